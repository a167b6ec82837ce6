"""``make gpu``: quantization on the GPU, compared with the CPU, and its cost at the shape of a 7B model; see gpu.py."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_checks import MODEL, Machine
from gpu_measure import Measurement

#: Options of the quantizations that are made on both devices.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int8": {"method": "weight_only_int8"},
    "w8a8": {"method": "smooth_quant"},
    "awq": {"method": "awq"},
    "gptq": {"method": "gptq"},
    "gptq, own targets": {"method": "gptq", "targets": "own"},
    "gptq, 2 bits": {"method": "gptq", "bits": 2},
    "gradient": {"method": "gptq", "bits": 3, "importance": "gradient"},
    "tuned": {"method": "gptq", "bits": 2, "tune": "16steps"},
    "rotated": {"method": "gptq", "rotate": "learned"},
}
#: Relative difference of divergences up to which two devices count as equal: they sum in another order, which changes
#: codes that lie between two values, and what is rounded after them.
NEAR = 0.1
#: Blocks, samples and tokens per sample of the model whose quantization is timed; of a rehearsal.
BLOCKS, SAMPLES, LENGTH = 2, 32, 512
REHEARSED = 1, 2, 32
#: Parts of a quantization by GPTQ that are timed: where a function is looked up, and what it does.
PARTS: dict[str, str] = {
    "aiakq.quantizers.pipeline:prepare": "inspect the source, tokenize",
    "aiakq.quantizers.block_loop:first_inputs": "inputs of the first block",
    "aiakq.quantizers.model.source:SourceModel.load": "load a block",
    "aiakq.quantizers.model.smooth_mappings:BlockTrace.trace": "trace a block",
    "aiakq.quantizers.block.inputs:BlockInputs.gather": "statistics",
    "aiakq.quantizers.model.replay:Replay.keep": "keep inputs",
    "aiakq.quantizers.numerics.gptq:factors": "factor the Hessian",
    "aiakq.quantizers.numerics.code_grid:IntegerGrid.search": "search ranges",
    "aiakq.quantizers.numerics.gptq:round_columns": "loop over columns",
    "aiakq.quantizers.numerics.sweeps:move_columns": "sweep over columns",
    "aiakq.quantizers.numerics.sweeps:Descent._refit_groups": "refit scales in a sweep",
    "aiakq.quantizers.numerics.sweeps:Descent.sweep": "rest of the sweeps",
    "aiakq.quantizers.numerics.sweeps:Descent.refit_scales": "refit all scales",
    "aiakq.quantizers.numerics.gptq:GptqSolver.round": "rest of the rounding",
    "aiakq.quantizers.block.result:BlockResult.finish": "take the rounded weight",
    "aiakq.quantizers.block.decoder_block:DecoderBlock.advance": "outputs and errors",
    "aiakq.quantizers.block_loop:write_block": "write and verify",
    "aiakq.quantizers.pipeline:copy_tensors": "copy other tensors",
    "aiakq.quantizers.pipeline:copy_files": "copy files",
    "aiakq.formats.checkpoint_writer:CheckpointWriter.publish": "publish",
}
#: What is timed.
TIMED: dict[str, dict[str, Any]] = {
    "gptq --targets own": {"method": "gptq", "targets": "own"},
    "gptq": {"method": "gptq"},
    "gptq, 2 bits": {"method": "gptq", "bits": 2},
    "gptq --importance gradient": {"method": "gptq", "importance": "gradient"},
    "awq": {"method": "awq"},
    "smooth_quant": {"method": "smooth_quant"},
    "weight_only_int8": {"method": "weight_only_int8"},
}


def quantizing_agrees(name: str, machine: Machine) -> dict:
    """One of QUANTIZATIONS on the GPU: its divergence from the original is that of the same on the CPU."""
    found = {}
    for device in ("cpu", machine.device):
        began = time.monotonic()
        report = _quantized(MODEL, device, samples=8, seqlen=128, **QUANTIZATIONS[name])
        found |= {f"kl, {device}": report.kl, f"seconds, {device}": time.monotonic() - began}
    expected, kl = found["kl, cpu"], found[f"kl, {machine.device}"]
    assert expected and kl and abs(kl - expected) <= NEAR * expected, found
    return found


def quantize_parts(given: Measurement) -> dict:
    """Seconds of the parts of a GPTQ quantization, each without those inside it, waiting for the GPU at its ends."""
    from aiakq.kernels import triton

    blocks, samples, length = REHEARSED if given.machine.rehearsed else (1, SAMPLES, LENGTH)
    clock = _Clock(given.machine)
    notes = {"loops": triton.unavailable_reason("GPTQ") or "Triton"}

    def found() -> dict:
        return {"rows": clock.rows(), "notes": notes}

    clock.tick = lambda: given.save(found())

    with tempfile.TemporaryDirectory() as folder, clock.patched():
        source = _random_model(Path(folder, "source"), blocks, given.machine)
        # Compiles kernels and starts libraries, which a process does once.
        small = _random_model(Path(folder, "small"), 1, given.machine, small=True)
        with clock.timed("first use: a small model"):
            _quantized(small, given.machine.device, evaluate=False, samples=2, seqlen=64, dtype="bf16", method="gptq")
        clock.restart("first use: a small model")
        for options in (TIMED["gptq --targets own"], TIMED["gptq"]):
            title = options.get("targets", "original")
            clock.prefix = f"{title} targets, "
            with clock.timed("everything else"):
                _quantized(
                    source,
                    given.machine.device,
                    evaluate=False,
                    samples=samples,
                    seqlen=length,
                    dtype="bf16",
                    **options,
                )
            if given.left() < clock.total() + 5:
                break
    return found()


class _Clock:
    """Seconds and calls of functions by title, without those of timed functions that they call.

    tick  called about every second between them, to save what was found.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.prefix = machine, ""
        self.tick: Callable[[], None] = lambda: None
        self._ticked = 0.0
        self._spent: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._inside = [0.0]

    @contextmanager
    def timed(self, title: str) -> Iterator[None]:
        """Add the time of this context, and wait for the GPU at its ends."""
        title = self.prefix + title
        began = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = self._now() - began
            inside = self._inside.pop()
            self._inside[-1] += took
            self._spent[title] = self._spent.get(title, 0.0) + took - inside
            self._calls[title] = self._calls.get(title, 0) + 1
            if time.monotonic() - self._ticked > 1:
                self.tick()
                self._ticked = time.monotonic()

    def restart(self, title: str) -> None:
        """Replace all titles by one with the time of all."""
        spent = sum(self._spent.values())
        self._spent, self._calls = {title: spent}, {title: 1}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Time the calls of PARTS."""
        with ExitStack() as patches:
            for place, title in PARTS.items():
                module, _, path = place.partition(":")
                *above, name = path.split(".")
                owner: Any = importlib.import_module(module)
                for part in above:
                    owner = getattr(owner, part)
                patches.enter_context(patch.object(owner, name, self._wrapped(getattr(owner, name), title)))
            yield

    def _wrapped(self, function: Callable[..., Any], title: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self.timed(title):
                return function(*args, **named)

        return call

    def _now(self) -> float:
        if not self.machine.rehearsed:
            import torch

            torch.cuda.synchronize()
        return time.monotonic()

    def total(self) -> float:
        return sum(self._spent.values())

    def rows(self) -> list[dict]:
        """One row for each title, the slowest first."""
        return [
            {"part": title, "seconds": spent, "calls": self._calls[title]}
            for title, spent in sorted(self._spent.items(), key=lambda item: -item[1])
        ]


def quantize_speed(given: Measurement) -> dict:
    """Seconds and memory of blocks of Llama 2 7B's shape, of random weights, with every method."""
    import torch

    rows: list[dict] = []
    blocks, samples, length = REHEARSED if given.machine.rehearsed else (BLOCKS, SAMPLES, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        source = _random_model(Path(folder, "source"), blocks, given.machine)
        for title, options in TIMED.items():
            if rows and given.left() < 3 * rows[-1]["seconds"] + 5:
                break
            if not given.machine.rehearsed:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
            report = _quantized(
                source, given.machine.device, evaluate=False, samples=samples, seqlen=length, dtype="bf16", **options
            )
            row = {"method": title, "seconds": time.monotonic() - began, "blocks": blocks, "tokens": report.tokens}
            if not given.machine.rehearsed:
                row["GPU memory, GiB"] = torch.cuda.max_memory_allocated() / 2**30
            rows.append(row)
            given.save({"rows": rows})
    return {"rows": rows}


def _quantized(source: str, device: str, **options: Any) -> Any:
    """Quantize into a folder that is removed again, and return the report."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        return quantize_checkpoint(QuantizeOptions(input=source, output=f"{folder}/out", device=device, **options))


def _random_model(folder: Path, blocks: int, machine: Machine, small: bool = False) -> str:
    """Write a random Llama with the example model's tokenizer, of 7B's widths or, as in a rehearsal, small."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    hidden, inner, heads = (256, 512, 4) if small or machine.rehearsed else (4096, 11008, 32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
