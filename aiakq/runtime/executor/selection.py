"""Which executor runs the model of this process."""

from __future__ import annotations

from aiakq.runtime.distributed.rank_group import RankGroup
from aiakq.runtime.engine.records import Executor
from aiakq.runtime.executor.local import LocalExecutor
from aiakq.runtime.executor.model_proposer import ModelProposer
from aiakq.runtime.executor.multiprocess import MultiprocessExecutor
from aiakq.runtime.executor.pipeline import PipelineExecutor
from aiakq.runtime.executor.runner import Runner


def new_executor(
    runner: Runner, group: RankGroup | None, num_slots: int, max_pages: int, proposer: ModelProposer | None = None
) -> Executor:
    """The executor of this process, which leads the ranks of ``group`` if there are any, and alone has ``proposer``."""
    if group is None:
        return LocalExecutor(runner, num_slots, max_pages, proposer)
    if group.num_stages > 1:
        return PipelineExecutor(runner, group, num_slots, max_pages)
    return MultiprocessExecutor(runner, group, num_slots, max_pages, proposer)
