"""Pipeline stages: the layers of each, overlapping steps, and failures and out-of-memory errors in any stage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.distributed import child_ranks

PROMPTS = [{"prompt_token_ids": [5 + number, 17, 300, 41] * (1 + 3 * number)} for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 65, "dtype": "float32"}


def generate(llm: LLM) -> list[tuple[list[int], list]]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def runs(pid: int) -> bool:
    """Whether the process is running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_of(llm: LLM) -> list[int]:
    """Process ids of ranks 1 and up."""
    return [rank.process.pid for rank in llm.engine.executor._group._ranks]


@pytest.fixture
def stages(example_model) -> Callable[..., LLM]:
    return lambda **arguments: LLM(str(example_model), **{**SMALL, "pipeline_parallel_size": 2, **arguments})


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


@pytest.mark.parametrize("count", [2, 6])
def test_any_number_of_stages_gives_the_tokens_of_one_process(stages, alone, count):
    assert generate(stages(pipeline_parallel_size=count)) == alone


def test_stages_have_the_given_numbers_of_layers(stages, alone):
    llm = stages(pp_layer_partition="1,5")
    assert llm.engine.facts["layers"] == "1 of 6, and the others in other stages"
    assert generate(llm) == alone


@pytest.mark.parametrize("given", ["3,2", "6", "2,2,2"])
def test_a_partition_that_omits_layers_is_refused(stages, given):
    with pytest.raises(AiakqError, match=f"--pp-layer-partition is '{given}', which is not 2 numbers whose sum is 6"):
        stages(pp_layer_partition=given)


def test_the_partition_is_checked_with_one_stage_too(stages):
    with pytest.raises(AiakqError, match="--pp-layer-partition is '3,3', which is not 1 number whose sum is 6"):
        stages(pipeline_parallel_size=1, pp_layer_partition="3,3")


def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(AiakqError, match="the model has 6 layers, too few for 7 stages"):
        stages(pipeline_parallel_size=7)


def test_asynchronous_scheduling_is_refused_with_stages(stages):
    with pytest.raises(AiakqError, match="there, steps of other sequences run meanwhile"):
        stages(async_scheduling=True)


def test_as_many_steps_are_pending_as_there_are_stages(stages, monkeypatch):
    """A sequence whose next token is pending is in none of the later steps."""
    llm = stages(pipeline_parallel_size=3)
    executor, most = llm.engine.executor, 0
    collect = type(executor).collect

    def counted(self, step):
        nonlocal most
        most = max(most, len(self._pending))
        return collect(self, step)

    monkeypatch.setattr(type(executor), "collect", counted)
    generate(llm)
    assert most == 3


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_of_any_stage_is_named(stages, rank, how):
    llm = stages(tensor_parallel_size=2, distributed_timeout_seconds=1.5)
    generate(llm)
    pids = ranks_of(llm)
    os.kill(pids[rank - 1], how)
    began = time.monotonic()
    names = "Rank [123] timed out" if how == signal.SIGSTOP else f"Rank {rank} failed: it was ended by SIGKILL"
    with pytest.raises(AiakqError, match=names):
        generate(llm)
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 10
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "all ranks end"
        time.sleep(0.05)


def test_a_stopped_stage_is_the_one_that_is_named(stages):
    llm = stages(pipeline_parallel_size=3, distributed_timeout_seconds=1.5)
    generate(llm)
    os.kill(ranks_of(llm)[1], signal.SIGSTOP)
    with pytest.raises(AiakqError, match=r"Rank 2 timed out after 1.5 s: no heartbeat"):
        generate(llm)


def test_a_step_that_takes_longer_than_the_time_limit_is_not_lost(stages, alone, patched):
    patched("""
import time
from aiakq.runtime.executor.runner import Runner
original, count = Runner.forward, [0]
def forward(self, step):
    count[0] += 1
    if count[0] == 3: time.sleep(2.5)
    return original(self, step)
Runner.forward = forward""")
    assert generate(stages(distributed_timeout_seconds=1.0)) == alone


@pytest.mark.process_failures
def test_a_rank_that_fails_says_why(stages, patched):
    patched("""
from aiakq.runtime.executor.runner import Runner
def forward(self, step): raise ArithmeticError("the cause")
Runner.forward = forward""")
    llm = stages()
    with pytest.raises(AiakqError, match="Rank 1 failed: ArithmeticError: the cause"):
        generate(llm)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_exhausts_the_memory_of_a_later_stage_runs_in_parts(stages, patched, alone, size):
    patched("""
from aiakq.runtime.executor.runner import Runner
original, count = Runner.forward, [0]
def forward(self, step):
    count[0] += 1
    if count[0] % 3 == 0 and len(step.token_ids) > 1: raise MemoryError
    return original(self, step)
Runner.forward = forward""")
    llm = stages(tensor_parallel_size=size, pipeline_parallel_size=3)
    assert generate(llm) == alone
    assert generate(llm) == alone
    llm.engine.check()


def test_a_stage_runs_out_of_memory_while_an_earlier_step_is_awaited(stages, patched, alone):
    patched("""
import time
from aiakq.runtime.executor.runner import Runner
original, count = Runner.forward, [0]
def forward(self, step):
    count[0] += 1
    if self.model.stage.is_last and count[0] == 1: time.sleep(1)
    if not self.model.stage.is_last and count[0] == 2: raise MemoryError
    return original(self, step)
Runner.forward = forward""")
    llm = stages(pipeline_parallel_size=3, max_num_batched_tokens=32)
    assert generate(llm) == alone
    llm.engine.check()


def test_a_step_that_exhausts_the_memory_of_the_first_stage_runs_in_parts(stages, alone, monkeypatch):
    llm = stages(pipeline_parallel_size=3)
    original, count = type(llm.engine.executor.runner).forward, [0]

    def forward(self, step):
        count[0] += 1
        if count[0] % 3 == 0 and len(step.token_ids) > 1:
            raise MemoryError
        return original(self, step)

    monkeypatch.setattr(type(llm.engine.executor.runner), "forward", forward)
    assert generate(llm) == alone
    llm.engine.check()


def test_steps_pending_at_an_abort_do_not_affect_later_requests(stages, alone):
    llm = stages(pipeline_parallel_size=3)
    engine = llm.engine
    generate(llm)
    from aiakq.runtime.protocol.request import RequestSpec

    for number in range(3):
        spec = RequestSpec(str(number), PROMPTS[number]["prompt_token_ids"], GREEDY, max_tokens=24, seed=0)
        engine.step(0.0, [spec])
    assert engine._pending
    engine.abort_all()
    assert generate(llm) == alone


def test_logits_processors_are_refused(stages):
    params = SamplingParams(max_tokens=4, logits_processors=[lambda tokens, logits: logits])
    with pytest.raises(AiakqError, match="logits_processors"):
        stages().generate(PROMPTS[0], params, use_tqdm=False)
