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


STEPS: tuple[Callable[[], dict], ...] = (describe, kernels_match_the_cpu, tokens_match_the_cpu, timings)


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
