"""The steps of ``make gpu`` that need two GPUs: tensor parallelism over NCCL; see gpu.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_checks import MODEL, PROMPTS, Machine, NeedsGpuError

#: The program of the other rank of ``meeting_times``.
SCRIPT = Path(__file__).with_name("gpu.py")
RANKS = 2
#: Rows and columns of an all-reduce: hidden states of Llama 3 8B, in bf16.
SIZES = ((1, 4096), (16, 4096), (64, 4096), (512, 4096))
#: All-reduces of a graph.
REPEATS = 20


def needs_gpus(machine: Machine) -> None:
    """Raise NeedsGpuError if there are fewer GPUs than ranks; a rehearsal continues on the CPU."""
    import torch

    if not machine.rehearsed and torch.cuda.device_count() < RANKS:
        raise NeedsGpuError(f"it needs {RANKS} GPUs, and {torch.cuda.device_count()} can be seen")


def ranks_agree(machine: Machine) -> dict:
    """The example model in 4 bits on two ranks: in the exact mode its answers and log-probabilities are those of one,
    in the fast one tokens are, mostly.
    """
    import torch

    from aiakq import LLM, SamplingParams
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    needs_gpus(machine)
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=2)
    answers: dict[tuple[int, str], list] = {}
    facts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/out"
        quantize_checkpoint(QuantizeOptions(input=MODEL, output=output, method="weight_only_int8"))
        for size, math in ((1, "exact"), (RANKS, "exact"), (RANKS, "fast")):
            llm = LLM(
                model=output, device=machine.device, dtype="bfloat16", gpu_memory_utilization=0.2,
                tensor_parallel_size=size, tensor_parallel_math=math,
            )  # fmt: skip
            found = [result.outputs[0] for result in llm.generate(PROMPTS * 8, params, use_tqdm=False)]
            llm.engine.check()
            answers[size, math] = [(one.token_ids, one.logprobs) for one in found]
            facts[f"{size} ranks, {math}"] = f"{llm.engine.facts.get('tensor parallel')}; {llm.engine.facts['step']}"
            del llm
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    alone = answers[1, "exact"]
    same = sum(ours == theirs for ours, theirs in zip(answers[RANKS, "exact"], alone, strict=True))
    close = sum(ours[0] == theirs[0] for ours, theirs in zip(answers[RANKS, "fast"], alone, strict=True))
    assert same == len(alone), f"{same} of {len(alone)} answers of the exact mode are those of one rank"
    assert close >= len(alone) / 2, f"{close} of {len(alone)} answers of the fast mode have the tokens of one rank"
    return {"exact": same, "fast": close, "notes": facts}


def meeting_times(machine: Machine) -> dict:
    """Microseconds of one all-reduce and one gather of two ranks, launched one by one and in a CUDA graph."""
    needs_gpus(machine)
    descriptor = os.memfd_create("ranks")
    words = [sys.executable, str(SCRIPT), "--meet", machine.device, str(descriptor)]
    with subprocess.Popen(words, pass_fds=[descriptor]) as process:
        rows = meet(machine.device, descriptor, 0)
        assert process.wait(30) == 0, "the other rank failed"
    return {"rows": rows}


def meet(device: str, descriptor: int, rank: int) -> list[dict[str, Any]]:
    """The measurement of ``meeting_times`` in one rank."""
    import torch

    from aiakq.kernels.torch_collective import TorchCollective

    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    collective = TorchCollective(descriptor, rank, RANKS, 30.0, place)
    collective.connect(60.0)
    assert not collective.is_given_up, "the ranks do not meet"
    rows = []
    for m, n in SIZES:
        x = torch.ones(m, n, dtype=torch.bfloat16, device=place)
        share, bounds = x[:, : n // 2], [0, n // 2, n]
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": lambda x=x: collective.sum(x),
            "gather": lambda share=share, bounds=bounds: collective.gather(share, bounds),
        }
        for name, call in calls.items():
            row = {"operation": name, "rows": m, "kib": m * n * 2 / 1024, "us": _microseconds(call, place, 1)}
            if device == "cuda":
                row["us_in_graph"] = _microseconds(_graph(call), place, REPEATS)
            rows.append(row)
    return rows


def _graph(call: Callable[[], object]) -> Callable[[], None]:
    from aiakq.runtime.executor.cuda_graphs import captured

    def repeated() -> None:
        for _ in range(REPEATS):
            call()

    return captured(repeated, None)


def _microseconds(call: Callable[[], object], device: Any, per_call: int) -> float:
    """Return the microseconds of one of the operations that ``call`` runs: the median of synchronized calls."""
    import torch

    times = []
    for _ in range(30):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e6 / per_call)
    return statistics.median(times[10:])


def rank_speed(
    ceilings: dict[str, float], left: Callable[[], float], save: Callable[[dict], None], machine: Machine
) -> dict:
    """Steps of the whole engine at Llama 3 8B's shape on one GPU and, in both modes, on two."""
    import gpu_speed
    import gpu_steps

    needs_gpus(machine)
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    small: dict[str, Any] = {}
    if machine.rehearsed:
        small = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 40}
    for size, math in ((1, "fast"), (RANKS, "fast"), (RANKS, "exact")):
        options = {"tensor_parallel_size": size, "tensor_parallel_math": math, **small}
        shape = (gpu_speed.SMALL, (1, 3), 40, 8) if machine.rehearsed else (gpu_speed.LLAMA, (1, 16, 64), 1024, 24)
        found = gpu_steps.engine_speed(ceilings, left, *shape, **options)
        rows += [{"ranks": size, "math": math, **row} for row in found["rows"]]
        notes |= {f"{size} ranks, {math}: {name}": note for name, note in found["notes"].items()}
        save({"rows": rows, "notes": notes})
    return {"rows": rows, "notes": notes}
