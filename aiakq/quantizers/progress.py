"""Progress callbacks of a run, and the exception that rejects its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiakq.evaluation.metrics import Comparison


@dataclass(frozen=True)
class StageProgress:
    """``done`` of ``total`` steps of ``stage`` are finished; ``detail`` names the present one."""

    stage: str
    done: int
    total: int
    detail: str = ""


OnProgress = Callable[[StageProgress], None]


class Rejected(Exception):
    """The output was made and measured, but is not what was wanted; nothing was published."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
