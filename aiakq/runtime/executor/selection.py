"""Selection of the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.runtime.engine.executor import Executor
from aiakq.runtime.executor.local import LocalExecutor
from aiakq.runtime.executor.runner import Runner

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rank_group import RankGroup
    from aiakq.runtime.executor.model_proposer import ModelProposer


def new_executor(
    runner: Runner, group: RankGroup | None, num_slots: int, max_pages: int, proposer: ModelProposer | None = None
) -> Executor:
    """Create the executor of this process, which drives the ranks of ``group`` if there are any.

    proposer  proposes draft tokens with a model; not supported with pipeline stages.
    """
    if group is None:
        return LocalExecutor(runner, num_slots, max_pages, proposer)
    if group.num_stages > 1:
        from aiakq.runtime.executor.pipeline import PipelineExecutor

        return PipelineExecutor(runner, group, num_slots, max_pages)
    from aiakq.runtime.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(runner, group, num_slots, max_pages, proposer)
