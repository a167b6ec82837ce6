"""The measuring steps of ``make gpu``, each of which runs in a process of its own; see gpu.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gpu_checks
from gpu_checks import Machine

SCRIPT = str(Path(__file__).with_name("gpu.py"))
OUT = Path(os.environ.get("OUT", "out/gpu"))


@dataclass
class Measurement:
    """The arguments of a measuring step.

    ceilings  maximum speeds of the GPU, from the step of that name.
    left      seconds until the step is stopped.
    save      stores an incomplete result, in case the step is stopped.
    """

    machine: Machine
    ceilings: dict[str, float]
    left: Callable[[], float]
    save: Callable[[dict], None]


def ceilings(given: Measurement) -> dict:
    """Measure the maximum speeds of this GPU: a copy, and large products in bf16 and int8."""
    import torch

    from aiakq.bench import timing

    return timing.ceilings(torch.device(given.machine.device), torch.bfloat16)


def compiled_in_parallel(given: Measurement) -> dict:
    """Kernels of the products that are measured, compiled by a process for each shape and format: Triton keeps them."""
    import gpu_speed

    given.machine.needs_gpu()
    words = [sys.executable, SCRIPT, "--warm"]
    processes = [
        subprocess.Popen([*words, name, kind], stderr=subprocess.DEVNULL)
        for name in gpu_speed.SHAPES
        for kind in gpu_speed.FORMATS
    ]
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(1, given.left() - 3)))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return {"processes": len(codes), "done": codes.count(0)}


def warm(name: str, kind: str) -> None:
    """Compile the kernels of one shape and format."""
    import gpu_speed
    import torch

    device = torch.device("cuda")
    layer = gpu_speed.weight(kind, *gpu_speed.SHAPES[name], device)
    for m in gpu_speed.ROWS:
        layer(torch.randn(m, gpu_speed.SHAPES[name][1], dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()


def product_speed(given: Measurement) -> dict:
    """Products of Llama 3 8B's shapes in every format, beside other kernels."""
    import gpu_speed

    given.machine.needs_gpu()
    return gpu_speed.products(given.ceilings, given.left, save=given.save)


def attention_speed(given: Measurement) -> dict:
    """Decoding and prompts over pages, beside other kernels."""
    import gpu_speed
    import torch

    if given.machine.rehearsed:
        small = ((2, 48),), (32,), torch.device("cpu"), torch.float32
        return gpu_speed.attention_speed(given.ceilings, given.left, *small, save=given.save)
    return gpu_speed.attention_speed(given.ceilings, given.left, save=given.save)


def layer_speed(name: str, given: Measurement) -> dict:
    """Attention over latents, recurrent layers, or launches of either, of the sizes of models."""
    import gpu_layers
    import torch

    from aiakq.kernels.types import AttentionSpec

    if name in ("chunked", "latent_splits"):
        given.machine.needs_gpu()

    table = gpu_layers.Table(given.ceilings, torch.device(given.machine.device), given.save, [], {})
    small: dict = {}
    if given.machine.rehearsed:
        small = {"dtype": torch.float32}
        if name == "latents":
            small |= {
                "prompts": (20,),
                "decoding": ((2, 48),),
                "spec": AttentionSpec(4, 1, 48, 0.1, value_dim=32, latent=True),
            }
        else:
            small |= {"prompts": ((1, 20),), "models": {"small": ("delta_rule", 4, 2, 24, 32)}}
            small |= {"batches": (2,)}
    return getattr(gpu_layers, name)(table, given.left, **small)


def engine_speed(given: Measurement) -> dict:
    """Steps of the whole engine at Llama 3 8B's shape, random weights."""
    import gpu_speed
    import gpu_steps

    if given.machine.rehearsed:
        small = gpu_speed.SMALL, (1, 3), 40, 8
        options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 40}
        return gpu_steps.engine_speed(given.ceilings, given.left, *small, save=given.save, **options)
    return gpu_steps.engine_speed(given.ceilings, given.left, save=given.save)


def mixture_speed(given: Measurement) -> dict:
    """Steps of the whole engine for mixtures of experts, random weights."""
    import gpu_steps

    given.machine.needs_gpu()
    rows: list[dict] = []
    notes: dict[str, str] = {}

    def joined(name: str, found: dict) -> dict:
        own = {f"{name}: {key}": text for key, text in found["notes"].items()}
        return {"rows": [*rows, *({"model": name} | row for row in found["rows"])], "notes": notes | own}

    for name, (config, specs) in gpu_steps.MIXTURES.items():
        save = partial(_save_joined, given.save, partial(joined, name))
        found = gpu_steps.engine_speed(given.ceilings, given.left, config, save=save, specs=specs, floor=False)
        rows, notes = joined(name, found).values()
    return {"rows": rows, "notes": notes}


def _save_joined(save: Callable[[dict], None], joined: Callable[[dict], dict], found: dict) -> None:
    save(joined(found))


def example_model_speed(given: Measurement) -> dict:
    """Tokens per second of the example model at several batch sizes, with asynchronous scheduling and without."""
    from aiakq import LLM, SamplingParams

    llm = LLM(model=gpu_checks.MODEL, device=given.machine.device, gpu_memory_utilization=0.2)
    rows: list[dict] = []
    for batch in (1, 4) if given.machine.rehearsed else (1, 16, 128):
        prompts = [{"prompt_token_ids": [5 + i] * 32} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        row: dict[str, float] = {"batch": batch}
        for name, ahead in (("tokens_per_s", True), ("synchronous", False)):
            llm.engine.max_pending_steps = 2 if ahead else 1
            llm.generate(prompts, params, use_tqdm=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            row[name] = batch * 64 / (time.perf_counter() - began)
        rows.append(row)
        given.save({"rows": rows})
    return {"rows": rows, "facts": llm.engine.facts}


def verification_speed(given: Measurement) -> dict:
    """Tokens per second of the example model on a text that repeats itself, without draft tokens and with them."""
    from aiakq import LLM, SamplingParams

    prompts = [{"prompt_token_ids": [*range(5, 25)] * 8}]
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    arguments = {"device": given.machine.device, "gpu_memory_utilization": 0.2}
    rows: list[dict] = []
    for method in ("none", "ngram", "suffix"):
        config = None if method == "none" else {"method": method, "num_speculative_tokens": 7}
        llm = LLM(model=gpu_checks.MODEL, speculative_config=config, **arguments)
        llm.generate(prompts, params, use_tqdm=False)
        steps, began = llm.engine.stats.steps, time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds, steps = time.perf_counter() - began, llm.engine.stats.steps - steps
        rows.append({"method": method, "tokens_per_s": 128 / seconds, "steps": steps, "step_ms": 1e3 * seconds / steps})
        given.save({"rows": rows})
    return {"rows": rows}


def rank_speed(given: Measurement) -> dict:
    """Steps of the whole engine on one GPU, and on two in both modes of tensor parallelism."""
    import gpu_ranks

    return gpu_ranks.rank_speed(given.ceilings, given.left, given.save, given.machine)


def sanitized(given: Measurement) -> dict:
    """compute-sanitizer's memcheck and racecheck over small problems, where the tool is installed."""
    given.machine.needs_gpu()
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        return {"notes": {"not run": "compute-sanitizer is not installed"}}
    found = {}
    for check in ("memcheck", "racecheck"):
        words = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, SCRIPT, "--small"]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=given.left() - 3)
        except subprocess.TimeoutExpired:
            found[check] = "no time left"
            continue
        said = (done.stdout + done.stderr)[-2000:]
        assert done.returncode == 0, f"{check}: {said}"
        found[check] = said.strip().splitlines()[-1]
        given.save({"notes": found})
    return {"notes": found}


def variants(given: Measurement) -> dict:
    """Launch configurations of weight-only products, compared with those in use."""
    import gpu_variants
    import torch

    given.machine.needs_gpu()
    return gpu_variants.variants(given.left, given.save, OUT, torch.device("cuda"))


def tuning(given: Measurement) -> dict:
    """The fastest launch configurations for Llama 3 8B's shapes, written beside the results."""
    import gpu_speed

    given.machine.needs_gpu()
    return gpu_speed.tune(OUT)
