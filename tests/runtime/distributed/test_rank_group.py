"""Ranks that are lost, hang, disagree or run out of memory: the rank is named promptly, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.distributed import child_ranks, rank_group
from aiakq.runtime.distributed.messages import Sampled

PROMPTS = [{"prompt_token_ids": [5 + number, 17, 300, 41]} for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 65, "dtype": "float32"}


def generate(llm: LLM) -> list[tuple[list[int], list]]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def ranks_of(llm: LLM) -> list[int]:
    """Process ids of ranks 1 and up."""
    return [rank.process.pid for rank in llm.engine.executor._group._ranks]


@pytest.fixture
def two_ranks(example_model) -> Callable[..., LLM]:
    return lambda **arguments: LLM(str(example_model), **{**SMALL, "tensor_parallel_size": 2, **arguments})


@pytest.fixture(scope="module")
def alone(example_model) -> list[tuple[list[int], list]]:
    return generate(LLM(str(example_model), **SMALL))


@pytest.fixture
def patched(monkeypatch) -> Iterator[Callable[[str], None]]:
    """``patched(code)`` makes the process of every rank but 0 run ``code`` first."""

    def patch(code: str) -> None:
        start = "from aiakq.runtime.build.rank_process import main; main()"
        monkeypatch.setattr(child_ranks, "_CODE", f"{code}\n{start}")

    yield patch


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_ranks_gives_the_tokens_of_one_process(two_ranks, alone, size):
    """Four query heads and two KV heads: with five ranks, one has no head."""
    assert generate(two_ranks(tensor_parallel_size=size)) == alone


@pytest.mark.process_failures
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_named_at_once(two_ranks, how):
    llm = two_ranks()
    generate(llm)
    os.kill(ranks_of(llm)[0], how)
    began = time.monotonic()
    with pytest.raises(AiakqError, match=f"Rank 1 failed: it was ended by {how.name}") as failure:
        generate(llm)
    # Two seconds, and a slow machine.
    assert time.monotonic() - began < 5 and failure.value.id == "rank_failed"


def test_a_rank_that_hangs_is_named_after_the_time_limit(two_ranks):
    llm = two_ranks(distributed_timeout_seconds=1.5)
    generate(llm)
    (pid,) = ranks_of(llm)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(AiakqError, match=r"Rank 1 timed out after 1.5 s: gather \d+") as failure:
        generate(llm)
    assert time.monotonic() - began < 8 and failure.value.id == "rank_late"
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, "a stopped rank is killed too"
        time.sleep(0.05)


@pytest.mark.process_failures
def test_a_rank_that_fails_says_why(two_ranks, patched):
    patched("""
from aiakq.runtime.executor.runner import Runner
def forward(self, step): raise ArithmeticError("the cause")
Runner.forward = forward""")
    llm = two_ranks()
    with pytest.raises(AiakqError, match="Rank 1 failed: ArithmeticError: the cause"):
        generate(llm)


def test_a_rank_that_does_not_load_is_named(two_ranks, patched, monkeypatch):
    monkeypatch.setattr(rank_group, "LOAD_SECONDS", 1.0)
    patched("import time; time.sleep(60)")
    with pytest.raises(AiakqError, match="Rank 1 timed out after 1 s: loading the model"):
        two_ranks()


@pytest.mark.process_failures
def test_a_rank_with_other_files_is_refused(two_ranks, patched):
    patched("""
from aiakq.runtime.distributed import rank_group
rank_group.checkpoint_digest = lambda config: "another"
""")
    with pytest.raises(AiakqError, match="Rank 1 failed: it loaded different files, or runs a different version"):
        two_ranks()


def test_ranks_that_diverge_are_stopped(two_ranks, patched):
    patched("""
from aiakq.runtime.executor.runner import Runner
original = Runner.prepare
def prepare(self, *args):
    found = original(self, *args)
    found.numbers[1][0] += 1
    return found
Runner.prepare = prepare""")
    llm = two_ranks()
    with pytest.raises(AiakqError, match="its inputs differ from rank 0's"):
        generate(llm)


def test_a_step_that_exhausts_the_memory_of_one_rank_runs_in_parts(two_ranks, patched, alone):
    """Every third step fails on rank 1; the engine splits it, or runs it again, and the answers are the same."""
    patched("""
from aiakq.runtime.executor.runner import Runner
original, count = Runner.forward, [0]
def forward(self, step):
    count[0] += 1
    if count[0] % 3 == 0 and len(step.token_ids) > 1: raise MemoryError
    return original(self, step)
Runner.forward = forward""")
    llm = two_ranks()
    assert generate(llm) == alone
    assert generate(llm) == alone


def test_a_step_that_exhausts_the_memory_of_rank_0_runs_in_parts(two_ranks, alone, monkeypatch):
    llm = two_ranks()
    original, count = type(llm.engine.executor.runner).forward, [0]

    def forward(self, step):
        count[0] += 1
        if count[0] % 3 == 0 and len(step.token_ids) > 1:
            raise MemoryError
        return original(self, step)

    monkeypatch.setattr(type(llm.engine.executor.runner), "forward", forward)
    assert generate(llm) == alone


def test_no_rank_outlives_the_process_that_started_it(example_model):
    code = f"""
import sys
from aiakq import LLM
llm = LLM({str(example_model)!r}, max_model_len=128, num_gpu_blocks_override=65, tensor_parallel_size=3)
print(*[rank.process.pid for rank in llm.engine.executor._group._ranks], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        process.kill()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_concurrent_groups_do_not_interfere_and_leave_no_named_memory(two_ranks, alone):
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    first, second = two_ranks(), two_ranks()
    assert generate(first) == generate(second) == alone
    if before:
        assert set(os.listdir("/dev/shm")) == before
    pids = [*ranks_of(first), *ranks_of(second)]
    del first, second
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_reads_no_messages_is_named(two_ranks):
    """Its socket's buffer fills up before a gather waits for it."""
    llm = two_ranks(distributed_timeout_seconds=0.7)
    os.kill(ranks_of(llm)[0], signal.SIGSTOP)
    group = llm.engine.executor._group
    with pytest.raises(AiakqError, match="Rank 1 timed out after 0.7 s: receiving the next step"):
        for _ in range(100):
            group.send(Sampled([[]] * 100_000))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be shared out")
def test_rank_0_is_limited_to_its_threads_and_processors_until_the_group_is_closed(two_ranks, monkeypatch):
    cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    first, second = sorted(cpus)[:2]
    monkeypatch.setattr(child_ranks, "cpu_shares", lambda size: [[first], [second]])
    llm = two_ranks()
    (pid,) = ranks_of(llm)
    assert os.sched_getaffinity(0) == {first} and os.sched_getaffinity(pid) == {second}
    assert torch.get_num_threads() == max(1, threads // 2)
    del llm
    gc.collect()
    assert os.sched_getaffinity(0) == cpus and torch.get_num_threads() == threads


def test_an_interrupt_from_the_terminal_does_not_reach_the_ranks(two_ranks, alone):
    llm = two_ranks()
    (pid,) = ranks_of(llm)
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert generate(llm) == alone


def test_models_that_run_through_transformers_are_refused_by_name(tiny_model):
    with pytest.raises(AiakqError, match="models that run through transformers are not distributed over ranks"):
        LLM(str(tiny_model("GPTNeoXForCausalLM")), tensor_parallel_size=2, max_model_len=64)
