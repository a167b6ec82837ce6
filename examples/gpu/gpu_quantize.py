"""``make gpu``: quantization on the GPU, compared with the CPU, and its cost at the shape of a 7B model; see gpu.py."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

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
#: Blocks, samples and tokens per sample of the model whose quantization is timed.
BLOCKS, SAMPLES, LENGTH = 2, 32, 512
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


def quantize_speed(given: Measurement) -> dict:
    """Seconds and memory of blocks of Llama 2 7B's shape, of random weights, with every method."""
    import torch

    rows: list[dict] = []
    blocks, samples, length = (1, 2, 32) if given.machine.rehearsed else (BLOCKS, SAMPLES, LENGTH)
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


def _random_model(folder: Path, blocks: int, machine: Machine) -> str:
    """Write a Llama of random weights with the example model's tokenizer, of 7B's widths or in a rehearsal small."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    hidden, inner, heads = (256, 512, 4) if machine.rehearsed else (4096, 11008, 32)
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
