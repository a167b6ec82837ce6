"""Everything that needs an NVIDIA GPU, in one script, without a network: correctness first, then timings. ``make gpu``.

Runs with whatever Python starts it, from a bare checkout, and writes ``gpu.json`` and ``gpu.md`` under $OUT (default
out/gpu). What is measured is in gpu_speed.py, what it is measured against in gpu_peers.py. Ends within $BUDGET seconds
(default 520): what there is no time for is left out and said.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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

    from aiakq.kernels.ops import linear_reference as reference
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
            problem = weight.problem(torch.float32, device)
            answers.append(reference.prepare(weight, problem)(x.to(device)).cpu())
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


def one_step_ahead_changes_no_token(**arguments: Any) -> dict:
    """Answers of the example model, drawn in many ways, with asynchronous scheduling and without."""
    from aiakq import LLM, SamplingParams

    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0.7, "stop": ["the", "."], "min_tokens": 4},
    ]
    params = [SamplingParams(max_tokens=8 + n, seed=n, logprobs=1, **wishes[n % 4]) for n in range(32)]
    given = {"device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.2} | arguments
    answers = []
    for ahead in (True, False):
        llm = LLM(model=MODEL, async_scheduling=ahead, **given)
        told = llm.generate(PROMPTS * 8, params, use_tqdm=False)
        llm.engine.check()
        answers.append([(r.outputs[0].token_ids, r.outputs[0].text, r.outputs[0].finish_reason) for r in told])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same == len(params), f"{same} of {len(params)} answers are equal"
    return {"equal": same}


def triton_agrees_with_torch() -> dict:
    """The self-test that every load makes, and the assembly against its plain twin, bit for bit."""
    from dataclasses import replace

    import torch

    from aiakq.kernels import triton
    from aiakq.kernels.triton import configs, linear
    from aiakq.kernels.types import QWeight

    assert triton.unavailable_reason() is None, triton.unavailable_reason()
    device, compared = torch.device("cuda"), 0
    for scheme, bits in (("w2a16", 2), ("w4a16", 4), ("w8a16", 8)):
        codes = torch.randint(0, 2**bits, (512, 2048), dtype=torch.uint8)
        weight = QWeight(scheme, codes, torch.rand(512, 16).half(), group_size=128).to(device)
        for dtype in (torch.float16, torch.bfloat16):
            state = linear.prepare(weight, weight.problem(dtype, device.type))
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

    from aiakq.kernels.triton import linear
    from aiakq.kernels.triton.attention import TritonAttention
    from aiakq.kernels.types import AttentionContext, AttentionSpec, QWeight

    device = torch.device("cuda")
    weight = QWeight("w4a16", torch.randint(0, 16, (1024, 1024), dtype=torch.uint8), torch.rand(1024, 8).half() / 32)
    weight.group_size = 128
    state = linear.prepare(weight.to(device), weight.problem(torch.bfloat16, device.type))
    attention = TritonAttention(AttentionSpec(8, 2, 128, 0.1))
    cache = [torch.randn(64, 16, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    table = torch.arange(1, 33, dtype=torch.int32, device=device).view(4, 8)
    lengths = torch.tensor([5, 60, 100, 128], dtype=torch.int32, device=device)
    starts = torch.arange(5, dtype=torch.int32, device=device)
    context = AttentionContext(starts, lengths, lengths, table, 4, list(range(5)), lengths.tolist())
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)

    def compute() -> torch.Tensor:
        return attention.attend(state(x).view(4, 8, 128), cache, context)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in range(3):
        x.copy_(torch.randn(4, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, compute())
    return {"replays": 3}


def timings() -> dict:
    """Tokens per second of the example model at several batch sizes, with asynchronous scheduling and without."""
    from aiakq import LLM, SamplingParams

    llm = LLM(model=MODEL, device="cuda", gpu_memory_utilization=0.2)
    rows = []
    for batch in (1, 16, 128):
        prompts = [{"prompt_token_ids": [5 + i] * 32} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        row: dict[str, Any] = {"batch": batch}
        for name, ahead in (("tokens_per_s", True), ("one_after_another", False)):
            llm.engine.max_pending_steps = 2 if ahead else 1
            llm.generate(prompts, params, use_tqdm=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            row[name] = batch * 64 / (time.perf_counter() - began)
        rows.append(row)
    return {"rows": rows, "facts": llm.engine.facts}


def small_problems() -> dict:
    """Every kernel once on small shapes: what compute-sanitizer watches."""
    import gpu_speed
    import torch

    from aiakq.kernels.triton import self_test
    from aiakq.kernels.triton.attention import TritonAttention
    from aiakq.kernels.types import AttentionSpec, RotaryTables

    device = torch.device("cuda")
    assert self_test.failure(0) is None, self_test.failure(0)
    rotary = RotaryTables(*torch.randn(2, 9, 64, device=device))
    attention = TritonAttention(AttentionSpec(32, 8, 128, 0.1, 20, rotary))
    for stored in (torch.bfloat16, torch.int8, torch.float8_e5m2):
        for lengths, new in (([5, 40, 200], 1), ([33, 70], 7)):
            query, cache, context = gpu_speed.sequences(lengths, new, device, torch.bfloat16, stored)
            attention.attend(query, cache, context)
        query, cache, context = gpu_speed.sequences([3], 3, device, torch.bfloat16, stored)
        context.slots = torch.arange(16, 19, device=device)
        attention(torch.randn(3, 48 * 128, dtype=torch.bfloat16, device=device), context.slots - 16, cache, context)
    torch.cuda.synchronize()
    return {"kernels": "done"}


def sanitized() -> dict:
    """compute-sanitizer's memcheck and racecheck over ``small_problems``, where the tool is installed."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        return {"not run": "compute-sanitizer is not installed"}
    found = {}
    for check in ("memcheck", "racecheck"):
        words = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--small"]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=max(left() - 5, 1))
        except subprocess.TimeoutExpired:
            found[check] = "no time left"
            continue
        said = (done.stdout + done.stderr)[-2000:]
        assert done.returncode == 0, f"{check}: {said}"
        found[check] = said.strip().splitlines()[-1]
    return found


def compiled_in_parallel() -> dict:
    """Kernels of the products that are measured, compiled by a process for each shape and format: Triton keeps them."""
    import gpu_speed

    words = [sys.executable, __file__, "--warm"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([*words, name, kind], stderr=subprocess.DEVNULL))
            for name in gpu_speed.SHAPES
            for kind in gpu_speed.FORMATS
        ]
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(1, min(120, left() - 240))))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(None)
    return {"processes": len(codes), "done": codes.count(0)}


def warm(name: str, kind: str) -> None:
    import gpu_speed
    import torch

    device = torch.device("cuda")
    layer = gpu_speed.weight(kind, *gpu_speed.SHAPES[name], device)
    for m in gpu_speed.ROWS:
        layer(torch.randn(m, gpu_speed.SHAPES[name][1], dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()


def ceilings() -> dict:
    """What this GPU does at most, as measured: a copy, a large product in bf16, one of int8."""
    import torch

    from aiakq.bench import timing

    CEILINGS.update(timing.ceilings(torch.device("cuda"), torch.bfloat16))
    return dict(CEILINGS)


def product_speed() -> dict:
    import gpu_speed

    return gpu_speed.products(CEILINGS, left)


def attention_speed() -> dict:
    import gpu_speed

    return gpu_speed.attention_speed(CEILINGS, left)


def engine_speed() -> dict:
    import gpu_speed

    return gpu_speed.engine_speed(CEILINGS, left)


#: Filled by ``ceilings``, which comes before what needs them.
CEILINGS: dict[str, float] = {}
#: What is run, and the seconds it needs: with fewer left it is not begun.
STEPS: tuple[tuple[Callable[[], dict], float], ...] = (
    (describe, 0),
    (kernels_match_the_cpu, 5),
    (triton_agrees_with_torch, 20),
    (graphs_replay_what_was_computed, 10),
    (tokens_match_the_cpu, 20),
    (one_step_ahead_changes_no_token, 20),
    (compiled_in_parallel, 30),
    (ceilings, 5),
    (product_speed, 60),
    (attention_speed, 30),
    (engine_speed, 90),
    (timings, 20),
    (sanitized, 60),
)
#: Seconds for all of it; a machine may be lent for ten minutes.
BUDGET = float(os.environ.get("BUDGET", "520"))
BEGAN = time.monotonic()


def left() -> float:
    """Seconds until the budget is used up."""
    return BUDGET - (time.monotonic() - BEGAN)


def markdown(results: dict[str, dict]) -> str:
    """What was measured as tables, each row beside its roofline; what failed or was left out as lines."""
    lines = ["# make gpu", "", *(f"- {key}: {value}" for key, value in results.get("describe", {}).items())]
    lines += [f"- at most, {key}: {value:.4g}" for key, value in results.get("ceilings", {}).items() if key != "failed"]
    for title, found in results.items():
        state = "failed" if "failed" in found else "not begun" if "not begun" in found else "done"
        lines += ["", f"## {title}: {state}"]
        if state == "failed":
            lines += ["", f"    {found['failed'].strip().splitlines()[-1]}"]
        rows = found.get("rows") or []
        if rows:
            lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
        times = found.get("times") or {}
        if times:
            columns = sorted({m for each in times.values() for m in each}, key=int)
            lines += ["", "| times as fast, at rows | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            for name, each in times.items():
                cells = (f"{each[m]:.2f}" if m in each else "" for m in columns)
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += [f"- {name}: {note}" for name, note in (found.get("notes") or {}).items()]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: list[str]) -> int:
    make_importable()
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("make gpu: torch finds no NVIDIA GPU here; nothing was checked.\n")
        return 7
    if words[:1] == ["--small"]:
        small_problems()
        return 0
    if words[:1] == ["--warm"]:
        warm(*words[1:])
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    for step, seconds in STEPS:
        began = time.monotonic()
        try:
            results[step.__name__] = step() if left() > seconds else {"not begun": f"{left():.0f} s are left"}
        except Exception:
            results[step.__name__] = {"failed": traceback.format_exc()}
        took = time.monotonic() - began
        (OUT / "gpu.json").write_text(json.dumps(results, indent=1))
        (OUT / "gpu.md").write_text(markdown(results))
        sys.stderr.write(f"{step.__name__}, {took:.0f} s: {json.dumps(results[step.__name__])[:3000]}\n")
    return 1 if any("failed" in found for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
