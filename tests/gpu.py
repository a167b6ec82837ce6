"""Everything that needs an NVIDIA GPU, in one script, without a network: correctness first, then timings. ``make gpu``.

Runs with whatever Python starts it, from a bare checkout, and writes ``gpu.json`` under $OUT (default out/gpu).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "out/gpu"))
MODEL = str(ROOT / "examples" / "tinybooks")
PROMPTS = ["It was a dark night", "Alice was", "The old man said , `` I", "In the morning the sea"]


def make_importable() -> None:
    """Let a bare checkout be imported: kernels/ is the package aiakq.kernels, which only an installation maps."""
    try:
        import aiakq.kernels  # noqa: F401
    except ModuleNotFoundError:
        tree = Path(tempfile.mkdtemp()) / "aiakq"
        tree.mkdir()
        for entry in (ROOT / "aiakq").iterdir():
            (tree / entry.name).symlink_to(entry)
        (tree / "kernels").symlink_to(ROOT / "kernels")
        for name in [name for name in sys.modules if name.split(".")[0] == "aiakq"]:
            del sys.modules[name]
        sys.path.insert(0, str(tree.parent))


def describe() -> dict:
    import torch
    import transformers

    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def kernels_match_the_cpu() -> dict:
    """Every scheme of the reference kernels, and paged attention, on the GPU against the same on the CPU."""
    import torch

    from aiakq.kernels import reference
    from aiakq.kernels.types import QWeight

    worst = {}
    for scheme, bits in (("w4a16", 4), ("w8a16", 8), ("w8a8", 8)):
        group = 256 if scheme == "w8a8" else 64
        codes = torch.randint(0, 1 << bits, (96, 256), dtype=torch.uint8)
        scales = torch.rand(96, 256 // group) * 0.02
        x = torch.randn(5, 256)
        answers = []
        for device in ("cpu", "cuda"):
            weight = QWeight(scheme, codes.to(device), scales.to(device), group_size=group)
            problem = weight.problem(torch.float32, torch.device(device))
            answers.append(reference.run(x.to(device), reference.prepare(weight, problem)).cpu())
        worst[scheme] = ((answers[0] - answers[1]).norm() / answers[0].norm()).item()
    assert all(value < 1e-4 for value in worst.values()), worst
    return worst


def tokens_match_the_cpu() -> dict:
    """Greedy fp32 tokens of the example model on both devices."""
    import torch

    from aiakq import LLM, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(temperature=0, max_tokens=48)
    answers = {}
    for device in ("cpu", "cuda"):
        llm = LLM(model=MODEL, device=device, dtype="float32", gpu_memory_utilization=0.2)
        answers[device] = [r.outputs[0].token_ids for r in llm.generate(PROMPTS * 8, params, use_tqdm=False)]
        llm.engine.check()
    same = sum(a == b for a, b in zip(answers["cpu"], answers["cuda"], strict=True))
    assert same == len(answers["cpu"]), f"{same} of {len(answers['cpu'])} answers are equal"
    return {"equal": same}


def triton_agrees_with_torch() -> dict:
    """The trial that every load makes, and the assembly against its plain twin, bit for bit."""
    from dataclasses import replace

    import torch

    from aiakq.kernels import triton
    from aiakq.kernels.triton import configs, linear
    from aiakq.kernels.types import QWeight

    assert triton.trouble() is None, triton.trouble()
    device, compared = torch.device("cuda"), 0
    for scheme, bits in (("w2a16", 2), ("w4a16", 4), ("w8a16", 8)):
        codes = torch.randint(0, 2**bits, (512, 2048), dtype=torch.uint8)
        weight = QWeight(scheme, codes, torch.rand(512, 16).half(), group_size=128).to(device)
        for dtype in (torch.float16, torch.bfloat16):
            state = linear.prepare(weight, weight.problem(dtype, device))
            for m in (1, 8, 16, 33, 64, 300):
                x = torch.randn(m, 2048, dtype=dtype, device=device)
                chosen = configs.choose("grouped", device, bits, 512, state.steps, m)
                fast, plain = (linear.run(x, state, replace(chosen, plain=p)) for p in (False, True))
                assert torch.equal(fast, plain), (scheme, dtype, m)
                compared += 1
    return {"equal_to_the_plain_twin": compared}


def graphs_replay_what_was_computed() -> dict:
    """Products and decoding attention, captured once and replayed on other inputs."""
    import torch

    from aiakq.kernels.triton import linear, paged
    from aiakq.kernels.types import AttentionContext, QWeight

    device = torch.device("cuda")
    weight = QWeight("w4a16", torch.randint(0, 16, (1024, 1024), dtype=torch.uint8), torch.rand(1024, 8).half() / 32)
    weight.group_size = 128
    state = linear.prepare(weight.to(device), weight.problem(torch.bfloat16, device))
    cache = [torch.randn(64, 16, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    table = torch.arange(1, 33, dtype=torch.int32, device=device).view(4, 8)
    lengths = torch.tensor([5, 60, 100, 128], dtype=torch.int32, device=device)
    starts = torch.arange(5, dtype=torch.int32, device=device)
    context = AttentionContext(starts, lengths, lengths, table, 4, list(range(5)), lengths.tolist())
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)

    def compute() -> torch.Tensor:
        return paged.attend(linear.run(x, state).view(4, 8, 128), cache, context, 0.1)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in range(3):
        x.copy_(torch.randn(4, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, compute())
    return {"replays": 3}


#: Outputs and inputs of Llama 3 8B's products: q, k and v; attention's output; gate and up; down; the head.
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
#: Bytes of weights that are gone through before one comes again: more than the second cache holds.
ROTATED = 2**29


def microseconds(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Of one call: all of them captured in a graph, replayed, the median."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def ceilings() -> dict:
    """What this GPU does at most: GB/s of a copy, TFLOP/s of a large bf16 product, TOP/s of an int8 one."""
    import torch

    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(large)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c, d = (torch.randint(-9, 9, (8192, 8192), dtype=torch.int8, device="cuda") for _ in range(2))
    work = 2 * 8192**3 / 1e6
    return {
        "copy_gbps": 2 * large.numel() / microseconds([lambda: other.copy_(large)]) / 1e3,
        "bf16_tflops": work / microseconds([lambda: a @ b]),
        "int8_tops": work / microseconds([lambda: torch._int_mm(c, d.t())]),
    }


def makers(n: int, k: int) -> dict[str, tuple[float, Callable[[], Callable]]]:
    """For each format the bytes of a weight [N, K], and what makes one: a function of activations."""
    import torch

    from aiakq.kernels.triton import linear, w8a8
    from aiakq.kernels.types import QWeight

    device = torch.device("cuda")
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)

    def grouped(scheme: str, bits: int, group: int) -> Callable:
        scales = torch.rand(n, k // group, device=device).half() / 64
        weight = QWeight(scheme, codes % 2**bits, scales, group_size=group)
        state = linear.prepare(weight, weight.problem(torch.bfloat16, device))
        return lambda given: linear.run(given, state)

    def integers() -> Callable:
        weight = QWeight("w8a8", codes, torch.rand(n, 1, device=device), group_size=k)
        state = w8a8.prepare(weight, weight.problem(torch.bfloat16, device))
        return lambda given: w8a8.run(given, state)

    def dense() -> Callable:
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        return lambda given: torch.nn.functional.linear(given, weight)

    return {
        "bf16": (2 * n * k, dense),
        "w4a16": (n * k / 2, lambda: grouped("w4a16", 4, 128)),
        "w8a16": (n * k, lambda: grouped("w8a16", 8, k)),
        "w8a8": (n * k, integers),
    }


def products() -> dict:
    """Microseconds of one product: ours in three formats, and torch's in bf16."""
    import torch

    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, (n, k) in SHAPES.items():
        # Copies of each weight, so that none is found in a cache.
        formats = {
            title: [make() for _ in range(max(1, min(48, int(ROTATED / nbytes))))]
            for title, (nbytes, make) in makers(n, k).items()
        }
        table[name] = {}
        for m in ROWS:
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            table[name][str(m)] = {
                title: round(microseconds([partial(run, x) for run in runs]), 2) for title, runs in formats.items()
            }
        del formats
        torch.cuda.empty_cache()
    return table


def summary(table: dict) -> dict:
    """How many times as fast as bf16 each format is, the geometric mean over the shapes."""
    import math

    ratios: dict[str, dict[str, float]] = {}
    for m in map(str, ROWS):
        cells = [row[m] for row in table.values()]
        ratios[m] = {
            title: round(math.exp(sum(math.log(cell["bf16"] / cell[title]) for cell in cells) / len(cells)), 2)
            for title in cells[0]
        }
    return ratios


def product_speed() -> dict:
    table = products()
    return {"us": table, "times_bf16": summary(table)}


def attention_speed() -> dict:
    """Decoding over 1024 and 8192 positions: microseconds, and GB/s of keys and values."""
    import torch

    from aiakq.kernels.triton import paged
    from aiakq.kernels.types import AttentionContext

    device, found = torch.device("cuda"), {}
    for batch, length in ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 8192)):
        pages = batch * length // 16
        cache = [torch.randn(pages + 1, 16, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
        table = (torch.randperm(pages, device=device) + 1).to(torch.int32).view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        context = AttentionContext(starts, lengths, lengths, table, batch, list(range(batch + 1)), [length] * batch)
        query = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device=device)
        us = microseconds([partial(paged.attend, query, cache, context, 0.088)])
        found[f"{batch} x {length}"] = {"us": round(us, 1), "gbps": round(4 * batch * length * 8 * 128 / us / 1e3)}
        del cache
        torch.cuda.empty_cache()
    return found


def timings() -> dict:
    """Tokens per second of the example model at several batch sizes."""
    from aiakq import LLM, SamplingParams

    llm = LLM(model=MODEL, device="cuda", gpu_memory_utilization=0.2)
    rates = {}
    for batch in (1, 16, 128):
        prompts = [{"prompt_token_ids": [5 + i] * 32} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates[str(batch)] = batch * 64 / (time.perf_counter() - began)
    return {"tokens_per_s": rates, "facts": llm.engine.facts}


STEPS: tuple[Callable[[], dict], ...] = (
    describe,
    kernels_match_the_cpu,
    triton_agrees_with_torch,
    graphs_replay_what_was_computed,
    tokens_match_the_cpu,
    ceilings,
    product_speed,
    attention_speed,
    timings,
)


def main() -> int:
    make_importable()
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("make gpu: torch finds no NVIDIA GPU here; nothing was checked.\n")
        return 7
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    failed = 0
    for step in STEPS:
        try:
            results[step.__name__] = step()
        except Exception:
            results[step.__name__] = {"failed": traceback.format_exc()}
            failed += 1
        (OUT / "gpu.json").write_text(json.dumps(results, indent=1))
        sys.stderr.write(f"{step.__name__}: {json.dumps(results[step.__name__])}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
