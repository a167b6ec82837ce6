"""``make gpu``: the engine in 16 bits, where Triton's kernels and CUDA graphs run; see gpu.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gpu_checks import MODEL, PROMPTS, Machine, parts_at_a_tie

#: Nats between two tokens up to which 16-bit computations in another order may choose differently, and 8-bit caches.
NEAR_TIE_16, NEAR_TIE_8 = 0.25, 1.0
#: Formats of the example model: how ``quantize`` makes it.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "w4a16": {"method": "gptq", "samples": 8, "seqlen": 128},
    "w8a16": {"method": "weight_only_int8"},
    "w8a8": {"method": "smooth_quant", "samples": 8, "seqlen": 128},
    "fp8": {"method": "fp8"},
}
REPEATED = "It was the best of times , it was the worst of times , it was the"
#: Ways to run the same requests, each compared with the first.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"async_scheduling": False},
    "asynchronous": {},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": 1000}
    },
    "8-bit cache": {"kv_cache_dtype": "int8"},
}  # fmt: skip


def engine_modes_agree(name: str, machine: Machine) -> dict:
    """Greedy answers of one of FORMATS in each mode: those of the eager engine, or parted from it at a near tie."""
    with tempfile.TemporaryDirectory() as folder:
        return _modes(made(name, folder), machine)


def made(name: str, folder: str) -> str:
    """The example model in one of FORMATS, written into ``folder``."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    if not FORMATS[name]:
        return MODEL
    output = str(Path(folder, name))
    text = str(Path(MODEL).parent / "heldout.txt")
    options = {"calibration": text} | FORMATS[name] if "samples" in FORMATS[name] else FORMATS[name]
    quantize_checkpoint(QuantizeOptions(input=MODEL, output=output, evaluate=False, **options))
    return output


def _modes(model: str, machine: Machine) -> dict:
    from aiakq import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=64, logprobs=4, ignore_eos=True)
    prompts = [REPEATED, *PROMPTS]
    expected: list = []
    found: dict[str, Any] = {}
    for mode, arguments in MODES.items():
        llm = LLM(model=model, device=machine.device, dtype="bfloat16", gpu_memory_utilization=0.1, **arguments)
        answers = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.check()
        if not expected:
            expected = answers
            found["kernels"] = f"{llm.engine.facts['linear layers']}; attention {llm.engine.facts['attention']}"
        near = NEAR_TIE_8 if mode == "8-bit cache" else NEAR_TIE_16
        parted = sum(parts_at_a_tie(*pair, near) for pair in zip(expected, answers, strict=True))
        found[mode] = f"{len(prompts) - parted} of {len(prompts)} equal; {llm.engine.facts['step']}"
        if mode == "graphs" and not machine.rehearsed:
            assert llm.engine.executor.runner.captured.captured_sizes, "no step was replayed as a CUDA graph"
    return found
