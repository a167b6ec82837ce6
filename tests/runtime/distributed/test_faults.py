"""Ranks that are killed or stopped at any point, with two stages of two: one is named promptly, and none is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.distributed import child_ranks

PROMPTS = [{"prompt_token_ids": [5 + number, 17, 300, 41] * (1 + 5 * number)} for number in range(4)]
#: Seconds of ``distributed_timeout_seconds``, and what a busy machine may take beyond them.
LIMIT, MORE = 2.0, 15.0
#: Defines ``at(count)``, which ends or stops the process at the count-th call.
START = """
import os, signal
calls = [0]
def at(count):
    calls[0] += 1
    if calls[0] == count:
        os.kill(os.getpid(), signal.{how})
"""
MESSAGE = """
from aiakq.runtime.executor import follower
original = follower.Follower.apply
def apply(self, message):
    if self._rank == {rank} and type(message).__name__ == "{kind}":
        at({count})
    return original(self, message)
follower.Follower.apply = apply
"""
CALL = """
from aiakq.runtime.build import rank_process
follow = rank_process._follow
def patched(channel, load, connect):
    if load.rank == {rank}:
        import {module} as module
        owner = module{owner}
        original = getattr(owner, "{name}")
        def function(*args, **kwargs):
            at({count})
            return original(*args, **kwargs)
        setattr(owner, "{name}", function)
    return follow(channel, load, connect)
rank_process._follow = patched
"""
NO_MEMORY = """
from aiakq.runtime.executor.runner import Runner
forward, steps = Runner.forward, [0]
def short(self, step):
    steps[0] += 1
    if self.model.stage.is_last and steps[0] == 4:
        raise MemoryError
    return forward(self, step)
Runner.forward = short
"""


def message(kind: str, count: int = 1) -> str:
    return MESSAGE.replace("{kind}", kind).replace("{count}", str(count))


def call(module: str, owner: str, name: str, count: int = 1) -> str:
    code = CALL.replace("{module}", module).replace("{owner}", owner).replace("{name}", name)
    return code.replace("{count}", str(count))


#: Kinds of steps: where, in which rank, and code that gets it there.
PLACES = {
    "loading": (1, call("aiakq.runtime.build.model_loader", "", "load_model")),
    "counting pages": (2, call("aiakq.runtime.executor.kv_cache", "", "count_pages")),
    "making its cache": (3, call("aiakq.runtime.executor.runner", ".Runner", "__init__")),
    "a new batch": (1, message("Batch")),
    "a prompt": (2, message("Launch")),
    "an answer": (3, message("Launch", 9)),
    "what was sampled": (1, message("Sampled", 3)),
    "a gather of a prompt": (1, call("aiakq.kernels.cpu.gather", ".NativeCollective", "gather", 7)),
    "a gather of an answer": (3, call("aiakq.kernels.cpu.gather", ".NativeCollective", "gather", 120)),
    "hidden states": (2, call("aiakq.runtime.distributed.links", ".LinkReceiver", "receive", 5)),
    "sampling": (2, call("aiakq.runtime.executor.sampled_step", ".SampledStep", "launch_sampler", 4)),
    "abandoning": (3, NO_MEMORY + message("Abandon")),
    "beginning again": (2, NO_MEMORY + message("Resume")),
}  # fmt: skip


#: Ending and stopping in turns; with AIAKQ_KILLS, both everywhere.
CASES = [
    (place, how)
    for number, place in enumerate(PLACES)
    for turn, how in enumerate(("SIGKILL", "SIGSTOP"))
    if "AIAKQ_KILLS" in os.environ or turn == number % 2
]


@pytest.mark.process_failures
@pytest.mark.parametrize(("place", "how"), CASES)
def test_a_rank_is_lost_at(place, how, example_model, monkeypatch, tmp_path):
    rank, code = PLACES[place]
    started = tmp_path / "started"
    code = START.replace("{how}", how) + code.replace("{rank}", str(rank)) + write_pid(started)
    command = f"{code}\nfrom aiakq.runtime.build.rank_process import main; main()"
    monkeypatch.setattr(child_ranks, "_CODE", command)
    monkeypatch.setattr("aiakq.runtime.distributed.rank_group.SILENT_SECONDS", 4 * LIMIT)
    with pytest.raises(AiakqError) as failure:
        generate(str(example_model))
    assert failure.value.id == ("rank_failed" if how == "SIGKILL" else "rank_late")
    assert how == "SIGSTOP" or f"Rank {rank} failed: it was ended by SIGKILL" in str(failure.value)
    pids = [int(line) for line in started.read_text().splitlines()]
    assert len(pids) == 3
    deadline = time.monotonic() + MORE
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether the process is running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_pid(file: Path) -> str:
    return f'\nwith open({str(file)!r}, "a") as pids: print(os.getpid(), file=pids)\n'


def generate(folder: str) -> None:
    """Load and generate: a killed rank is detected at once, a stopped one after the time limit."""
    llm = LLM(
        folder, tensor_parallel_size=2, pipeline_parallel_size=2, max_model_len=128, num_gpu_blocks_override=65,
        enforce_eager=True, distributed_timeout_seconds=LIMIT,
    )  # fmt: skip
    began = time.monotonic()
    try:
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    finally:
        assert time.monotonic() - began < 9 * LIMIT + MORE
