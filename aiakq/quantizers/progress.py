"""Progress callbacks of a run, and the exception that rejects its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiakq.evaluation.metrics import Comparison


@dataclass(frozen=True)
class StageProgress:
    """``done`` of ``total`` steps of ``stage`` are finished; ``detail`` names the current one."""

    stage: str
    done: int
    total: int
    detail: str = ""


OnProgress = Callable[[StageProgress], None]


class Rejected(Exception):
    """Raised when the output was created and measured but does not meet the requirements; nothing is published."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
