"""Measurements of `make gpu`: steps of the whole engine, and what takes their time."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_speed import LLAMA, Left, Save, forget, roofline_us

from aiakq.formats import quantization_config
from aiakq.spec import Float8, QuantSpec

#: Formats of the whole engine: their quantization_config.
SPECS: dict[str, dict[str, Any] | None] = {
    "w4a16": quantization_config.write(QuantSpec("gptq", "gptq", 4, 128)),
    "w8a8": quantization_config.write(QuantSpec("smooth_quant", "compressed-tensors", 8, activation_bits=8)),
    "fp8": quantization_config.write(QuantSpec("fp8", "compressed-tensors", 8, activation_bits=8, float8=Float8())),
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "bf16": None,
}
#: A fourth of the layers of two mixtures of experts, and their formats.
QWEN3_30B = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "model_type": "qwen3_moe",
}
MXFP4 = quantization_config.write(QuantSpec("mxfp4", "compressed-tensors", 4, 32, table="e2m1", scale_type="e8m0"))
MIXTURES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any] | None]]] = {
    "Qwen3 30B A3B, 12 of 48 layers": (
        QWEN3_30B,
        {"w4a16": SPECS["w4a16"], "mxfp4": MXFP4, "fp8 blocks": SPECS["fp8 blocks"], "bf16": None},
    ),
}

#: Format of a whole engine -> its products.
FLOORS = {"bf16": "torch bf16"}


def step_floor_ms(config: dict[str, Any], kind: str, batch: int, context: int, ceilings: dict[str, float]) -> float:
    """Return the minimum milliseconds of a decoding step: all products, the head in bf16, one read of the cache."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    size = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * size
    shapes = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    us = layers * sum(roofline_us(n, k, batch, kind, ceilings) for n, k in shapes)
    us += roofline_us(config["vocab_size"], hidden, batch, "torch bf16", ceilings)
    return (us + layers * 2 * kv * 2 * context * batch / ceilings["gbps"] / 1e3) / 1e3


def step_ms(engine: Any, batch: int, steps: int, ahead: bool) -> float | None:
    """The median of steps of all ``batch`` sequences, or None where there is none. The first ones capture a graph."""
    engine.max_pending_steps = 2 if ahead else 1
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step(0.0, [])
        if engine.stats.num_scheduled_tokens == batch:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2] if times else None


def kernels_of_a_step(engine: Any, steps: int) -> str:
    """What takes the time of a step on the GPU: microseconds, launches and name of the kernels, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    engine.max_pending_steps = 1
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step(0.0, [])
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kept = totals.setdefault(event.name[:60], [0, 0])
            kept[0] += event.device_time / steps
            kept[1] += 1 / steps
    ordered = sorted(totals.items(), key=lambda each: -each[1][0])[:14]
    every = sum(us for us, _ in totals.values())
    return f"{every:.0f} us: " + "; ".join(f"{us:.0f} us, {count:.0f} x {name}" for name, (us, count) in ordered)


def random_engine(config: dict[str, Any], stored: dict[str, Any] | None, **arguments: Any) -> tuple[Any, float]:
    """An engine of a model of this shape at random weights, and the seconds that loading it took."""
    from aiakq.runtime.build.loading import load_engine
    from aiakq.runtime.config.engine import EngineConfig

    with tempfile.TemporaryDirectory() as folder:
        written = config | ({"quantization_config": stored} if stored else {})
        (Path(folder) / "config.json").write_text(json.dumps(written))
        began = time.perf_counter()
        engine = load_engine(EngineConfig.from_args({"model": folder, **arguments}))
        return engine, time.perf_counter() - began


def prompts_s(engine: Any, prompts: list[list[int]], max_tokens: int, prompt_tokens: int) -> float:
    """Seconds until the engine has computed new requests' prompts: ``prompt_tokens`` with those before them."""
    from aiakq.runtime.protocol.admission import admit
    from aiakq.runtime.protocol.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    inbox: list = [admit(str(n), prompt, params, engine.limits) for n, prompt in enumerate(prompts)]
    engine.step(0.0, inbox)
    while engine.has_work() and engine.stats.prompt_tokens < prompt_tokens:
        engine.step(0.0, [])
    return time.perf_counter() - began


def engine_speed(
    ceilings: dict[str, float],
    left: Left,
    config: dict[str, Any] = LLAMA,
    batches: tuple[int, ...] = (1, 16, 64, 256),
    context: int = 1024,
    steps: int = 24,
    save: Save = forget,
    specs: dict[str, dict[str, Any] | None] = SPECS,
    floor: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Decoding steps of the whole engine, from the scheduler to tokens on the host, at random weights: prepared while
    the one before runs, and one after another.
    """
    table: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    # Sequences whose prompts are computed decode while others are not done; they need pages too.
    budget = 8192
    most = 2 * steps + 16 + 2 * -(-max(batches) * context // budget)
    given = {
        **{"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": context + most},
        "max_num_batched_tokens": budget,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": list(batches)},
    }
    for kind, spec in specs.items():
        if left() < 40:
            notes[kind] = "no time left"
            continue
        engine, seconds = random_engine(config, spec, **given | arguments)
        notes[f"{kind} loaded in"] = f"{seconds:.1f} s"
        notes[f"{kind} runs"] = f"{engine.facts['linear layers']}; {engine.facts['attention']}; {engine.facts['step']}"
        num_prompt_tokens = 0
        for batch in batches:
            if left() < 20 + batch / 8:
                notes[f"{kind}, batch {batch}"] = "no time left"
                continue
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(5, config["vocab_size"], (batch, context), generator=generator).tolist()
            num_prompt_tokens += batch * context
            prompt_s = prompts_s(engine, prompts, most, num_prompt_tokens)
            step, waiting = (step_ms(engine, batch, steps, ahead) for ahead in (True, False))
            if torch.cuda.is_available():
                notes[f"{kind}, batch {batch}, kernels"] = kernels_of_a_step(engine, 3)
            engine.abort_all()
            if step is None or waiting is None:
                notes[f"{kind}, batch {batch}"] = "the pages do not hold so many at once"
                continue
            row = {"format": kind, "batch": batch, "step_ms": step, "synchronous_ms": waiting}
            row |= {"tokens_per_s": batch / step * 1e3, "prompt_tokens_per_s": batch * context / prompt_s}
            least = step_floor_ms(config, FLOORS.get(kind, kind), batch, context, ceilings) if floor else 0.0
            table.append(row | ({"roofline_ms": least, "reached": least / step} if floor else {}))
            save({"rows": table, "notes": notes})
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"rows": table, "notes": notes}
