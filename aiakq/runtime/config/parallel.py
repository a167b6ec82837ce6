"""ParallelConfig: over how many processes a model is distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks that compute one model together.

    tensor_parallel_size  processes that share each layer.
    timeout               seconds that a rank waits for another within a step.
    arguments             the engine's, as they were given: every rank makes its own configuration of them.
    """

    tensor_parallel_size: int
    timeout: float
    arguments: Mapping[str, Any] = field(repr=False)  # the token of the hub among them

    @staticmethod
    def from_args(args: Mapping[str, Any], given: Mapping[str, Any]) -> ParallelConfig:
        """args: checked ones; given: those that were."""
        return ParallelConfig(args["tensor_parallel_size"], args["distributed_timeout_seconds"], dict(given))


def planned_size(config_json: Mapping[str, Any]) -> int | None:
    """The tensor-parallel size that ``aiakq quantize`` made a checkpoint for; None if its config.json does not say."""
    record = config_json.get("aiakq")
    size = record.get("tp") if isinstance(record, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
