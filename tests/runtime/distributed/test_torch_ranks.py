"""Ranks as processes that communicate through torch.distributed, as those on GPUs do: here over gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.distributed import child_ranks, rank_group, starting

PROMPTS = [{"prompt_token_ids": [5 + number, 17, 300, 41]} for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 65, "dtype": "float32"}


def generate(llm: LLM) -> list[tuple[list[int], list]]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


@pytest.fixture(autouse=True)
def through_torch(monkeypatch) -> None:
    monkeypatch.setattr(starting, "transport_of", lambda config: "torch")


@pytest.fixture
def two_ranks(example_model) -> Callable[..., LLM]:
    return lambda **arguments: LLM(str(example_model), **{**SMALL, "tensor_parallel_size": 2, **arguments})


@pytest.fixture
def patched(monkeypatch) -> Callable[[str], None]:
    """``patched(code)`` makes the process of every rank but 0 run ``code`` first."""

    def patch(code: str) -> None:
        start = "from aiakq.runtime.build.rank_process import main; main()"
        monkeypatch.setattr(child_ranks, "_CODE", f"{code}\n{start}")

    return patch


def test_steps_submitted_ahead_get_tokens_from_rank_0_and_match_one_process_bit_for_bit(example_model, two_ranks):
    alone = generate(LLM(str(example_model), **SMALL))
    before = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else None
    llm = two_ranks(async_scheduling=True)
    collective = llm.engine.executor._collective
    sent, broadcast = [], collective.broadcast
    collective.broadcast = lambda x: sent.append(len(x)) or broadcast(x)
    assert generate(llm) == alone
    assert len(sent) > 10, "the tokens of the step before are not known when a step is submitted"
    assert before is None or os.listdir("/dev/shm") == before, "ranks find each other without a name"


def test_sums_give_close_results(example_model, two_ranks):
    alone, found = generate(LLM(str(example_model), **SMALL)), generate(two_ranks(tensor_parallel_math="fast"))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]


def test_stages_of_several_ranks_give_the_results_of_one_process(example_model, two_ranks):
    assert generate(two_ranks(pipeline_parallel_size=2)) == generate(LLM(str(example_model), **SMALL))


@pytest.mark.process_failures
@pytest.mark.parametrize("rank", [1, 3], ids=["of the first stage", "of the last stage"])
def test_a_rank_of_a_stage_that_hangs_is_named(two_ranks, rank):
    llm = two_ranks(pipeline_parallel_size=2, distributed_timeout_seconds=1.5)
    generate(llm)
    os.kill(llm.engine.executor._group._ranks[rank - 1].process.pid, signal.SIGSTOP)
    with pytest.raises(AiakqError, match=f"Rank {rank} timed out after 1.5 s") as failure:
        generate(llm)
    assert failure.value.id == "rank_late"


@pytest.mark.process_failures
def test_running_out_of_memory_in_the_first_of_several_stages_ends_all_ranks_with_the_reason(two_ranks, monkeypatch):
    llm = two_ranks(pipeline_parallel_size=2)

    def forward(self, step):
        raise MemoryError

    monkeypatch.setattr(type(llm.engine.executor.runner), "forward", forward)
    with pytest.raises(AiakqError, match="Rank 0 failed: it ran out of memory in a step that other ranks have begun"):
        generate(llm)


@pytest.mark.process_failures
def test_a_rank_that_is_killed_is_named_at_once(two_ranks):
    llm = two_ranks()
    generate(llm)
    os.kill(llm.engine.executor._group._ranks[0].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AiakqError, match="Rank 1 failed: it was ended by SIGKILL") as failure:
        generate(llm)
    assert time.monotonic() - began < 8 and failure.value.id == "rank_failed"


@pytest.mark.process_failures
def test_the_first_of_several_ranks_that_end_is_named(two_ranks):
    """Rank 1 loses its connection to rank 2, but does not report that before rank 0 knows why."""
    llm = two_ranks(tensor_parallel_size=3)
    generate(llm)
    os.kill(llm.engine.executor._group._ranks[1].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AiakqError, match="Rank 2 failed: it was ended by SIGKILL"):
        generate(llm)
    assert time.monotonic() - began < 20


@pytest.mark.process_failures
def test_an_operation_that_fails_is_named_with_its_cause(two_ranks):
    llm = two_ranks()
    collective = llm.engine.executor._collective

    class Broken:
        def allreduce(self, tensors, options):
            raise RuntimeError("NCCL error:\n unhandled system error")

    whole, collective._backend = collective._backend, Broken()
    collective.sum(torch.ones(1, 4))
    assert collective.is_given_up and collective.failure == "NCCL error: unhandled system error"
    with pytest.raises(AiakqError, match="Rank 0 failed: NCCL error: unhandled system error"):
        generate(llm)
    del whole  # rank 1 waits until this is freed


def test_a_rank_that_hangs_is_named_after_the_time_limit(two_ranks):
    llm = two_ranks(distributed_timeout_seconds=1.5)
    generate(llm)
    os.kill(llm.engine.executor._group._ranks[0].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    expected = r"Rank 1 timed out after 1.5 s: operation \d+ of torch.distributed"
    with pytest.raises(AiakqError, match=expected) as failure:
        generate(llm)
    assert time.monotonic() - began < 10 and failure.value.id == "rank_late"


def test_a_rank_that_does_not_start_is_named(two_ranks, patched, monkeypatch):
    monkeypatch.setattr(rank_group, "START_SECONDS", 1.0)
    patched("import time; time.sleep(60)")
    with pytest.raises(AiakqError, match="Rank 1 timed out after 1 s: initializing the process group"):
        two_ranks()


@pytest.mark.process_failures
def test_a_rank_that_ends_at_the_start_is_named_at_once(two_ranks, patched):
    patched("import os; os._exit(3)")
    with pytest.raises(AiakqError, match="Rank 1 failed: it ended with exit code 3"):
        two_ranks()


@pytest.mark.process_failures
def test_a_rank_that_shards_layers_differently_is_refused(two_ranks, patched):
    """Its collectives would not match those of the other ranks."""
    patched("""
from aiakq.kernels.ops import row_parallel
row_parallel._has_empty = lambda bounds: True""")
    with pytest.raises(AiakqError, match="Rank 1 failed: it shards layers differently"):
        two_ranks(tensor_parallel_math="fast")


@pytest.mark.process_failures
def test_a_rank_that_captures_its_steps_unlike_rank_0_is_refused(two_ranks, patched):
    patched("""
from aiakq.runtime.executor.runner import Runner
Runner.capture = lambda self, bounds, options: setattr(self, "captured", object())""")
    with pytest.raises(AiakqError, match="Rank 1 failed: it has captured its steps, unlike rank 0"):
        two_ranks()


@pytest.mark.process_failures
def test_running_out_of_memory_on_a_rank_ends_all_ranks_with_the_reason(two_ranks, patched):
    patched("""
from aiakq.runtime.executor.runner import Runner
def forward(self, step): raise MemoryError
Runner.forward = forward""")
    llm = two_ranks(distributed_timeout_seconds=5)
    with pytest.raises(AiakqError, match="Rank 1 failed: it ran out of memory in a step that other ranks have begun"):
        generate(llm)


@pytest.mark.process_failures
def test_running_out_of_memory_on_rank_0_ends_all_ranks_with_the_reason(two_ranks, monkeypatch):
    llm = two_ranks()

    def forward(self, step):
        raise MemoryError

    monkeypatch.setattr(type(llm.engine.executor.runner), "forward", forward)
    with pytest.raises(AiakqError, match="Rank 0 failed: it ran out of memory in a step that other ranks have begun"):
        generate(llm)


def test_a_step_that_rank_0_cannot_prepare_runs_in_parts(example_model, two_ranks, monkeypatch):
    """The other ranks have not started it."""
    alone, llm = generate(LLM(str(example_model), **SMALL)), two_ranks()
    kind = type(llm.engine.executor.runner)
    original, count = kind.prepare, [0]

    def prepare(self, *args):
        count[0] += 1
        if count[0] % 3 == 0:
            raise MemoryError
        return original(self, *args)

    monkeypatch.setattr(kind, "prepare", prepare)
    assert generate(llm) == alone
