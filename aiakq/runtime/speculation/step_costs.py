"""The time of steps by their number of tokens, measured on the loaded model: draft lengths are chosen from it."""

from __future__ import annotations

import itertools
import time

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.engine.executor import Executor
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.protocol.command import ResetSequences
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch
from aiakq.runtime.speculation.bookkeeping_costs import measure_bookkeeping
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.planner import DraftPlanner

#: Tokens of the steps that are measured, each of which verifies one token less.
SIZES = (1, 2, 4, 8, 16)
#: The same where a round over all sizes is no longer than ``_SECONDS``. Kernels compute several rows at a time, so that
#: a step of 3 tokens may take longer than one of 4.
ALL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
#: Rounds over all sizes: at least so many, and more within the first limit in seconds; none begins after the second.
_ROUNDS, _QUICK_SECONDS, _SECONDS = 7, 0.3, 2.0
#: Draft tokens of a proposal that is measured.
_PROPOSED = 4


def set_step_costs(
    config: EngineConfig, scheduler: Scheduler, executor: Executor, limits: ModelLimits, facts: dict[str, str]
) -> None:
    """Let ``scheduler`` choose draft lengths from the times of the loaded model, and add them to ``facts``, which are
    for the start-up table. Without speculation, or with dummy weights, nothing is measured.
    """
    speculation, planner = config.scheduler.speculation, scheduler.resource(DraftPlanner)
    if speculation is None or planner is None or config.pooling is not None:
        return
    facts["speculation"] = "draft lengths from assumed times of steps"
    if config.load.load_format != "dummy":
        max_tokens = min(planner.max_rows, planner.budget)
        costs = measure_step_costs(executor, scheduler.pool, limits, max_tokens, speculation.model is not None)
        if costs is not None:
            costs = costs.with_bookkeeping(*measure_bookkeeping(config.scheduler))
        planner.costs = costs or planner.costs
        if costs is not None:
            facts["speculation"] = describe_costs(costs)


def measure_step_costs(
    executor: Executor, pool: PagePool, limits: ModelLimits, max_tokens: int, has_draft_model: bool
) -> StepCosts | None:
    """Verify draft tokens in steps of ``SIZES`` tokens, up to ``max_tokens``, before any request arrives. The executor
    has no sequences then, and none afterwards.

    None where the model fails: the first request will tell.
    """
    length = min(max_tokens, limits.max_model_len - _PROPOSED - 1, pool.num_usable * pool.page_size - _PROPOSED)
    sizes = [size for size in ALL_SIZES if size <= length]
    pages = pool.allocate(-(-(max(sizes, default=0) + _PROPOSED) // pool.page_size)) if sizes else None
    if pages is None:
        return None
    try:
        cases = [(size, 0) for size in sizes] + [(1, _PROPOSED)] * has_draft_model
        seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        started = time.monotonic()
        for round_number in itertools.count():
            if round_number > _ROUNDS and time.monotonic() - started > _QUICK_SECONDS:
                break
            for case in cases:
                took = _measured_step(executor, limits, pages, *case)
                if took is None:
                    return None
                if round_number:  # the first one allocates memory
                    seconds[case].append(took)
            if round_number == 0 and time.monotonic() - started > _SECONDS:
                cases = [case for case in cases if case[0] in SIZES]
            if round_number and time.monotonic() - started > _SECONDS:
                break
    finally:
        pool.decref(pages)
    times = {case: min(seconds[case]) for case in cases}
    draft = (times[1, _PROPOSED] - times[1, 0]) / _PROPOSED if has_draft_model else 0.0
    return StepCosts({size: took for (size, proposed), took in times.items() if not proposed}, max(0.0, draft))


def _measured_step(
    executor: Executor, limits: ModelLimits, pages: list[int], size: int, num_proposed: int
) -> float | None:
    """Seconds of one step; None if the model computes nothing valid."""
    tokens = [(7919 * (index + 1)) % limits.vocab_size for index in range(size)]
    spec = RequestSpec("step costs", tokens[:1], SamplingParams(temperature=0.0), size + num_proposed + 1, seed=0)
    chunk = Chunk(0, 0, size, pages, True, drafts=tokens[1:], num_proposed=num_proposed)
    started = time.perf_counter()
    result = executor.submit(StepBatch([], [], [NewSequence(0, spec)], [chunk])).collect()
    took = time.perf_counter() - started
    executor.submit(StepBatch(commands=[ResetSequences()])).collect()
    is_valid = not result.out_of_memory and result.chunks[0].sampled and result.chunks[0].sampled[0].error is None
    return took if is_valid else None


def describe_costs(costs: StepCosts) -> str:
    """For the start-up table."""
    times = ", ".join(f"{size}: {1000 * costs.step(size):.3g}" for size in ALL_SIZES)
    proposal = costs.proposal(1)
    return f"ms of a step by tokens {times}" + (f"; of a draft token {1000 * proposal:.3g}" if proposal else "")
