"""ParallelConfig: over how many processes a model is distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks that compute one model together.

    tensor_parallel_size    processes that share each layer.
    pipeline_parallel_size  groups of such processes, each with some of the layers.
    layer_partition         layers of each group; None: so that they take equally long.
    math                    fast or exact: whether ranks add up parts of results, or put parts side by side.
    timeout                 seconds that a rank waits for another within a step.
    arguments               the engine's, as they were given: every rank makes its own configuration of them.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    layer_partition: tuple[int, ...] | None
    math: str
    timeout: float
    arguments: Mapping[str, Any] = field(repr=False)  # the token of the hub among them

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @staticmethod
    def from_args(args: Mapping[str, Any], given: Mapping[str, Any], device_type: str) -> ParallelConfig:
        """args: checked ones; given: those that were."""
        math = args["tensor_parallel_math"]
        if math == "auto":
            math = "fast" if device_type == "cuda" else "exact"
        return ParallelConfig(
            args["tensor_parallel_size"],
            args["pipeline_parallel_size"],
            args["pp_layer_partition"],
            math,
            args["distributed_timeout_seconds"],
            dict(given),
        )

    def remark(self, config_json: Mapping[str, Any]) -> str | None:
        """What to tell whoever serves a checkpoint with another tensor-parallel size than it was quantized for."""
        planned = planned_size(config_json)
        if planned in (None, self.tensor_parallel_size):
            return None
        return f"served with -tp {self.tensor_parallel_size}, quantized for -tp {planned}"


def planned_size(config_json: Mapping[str, Any]) -> int | None:
    """The tensor-parallel size that ``aiakq quantize`` made a checkpoint for; None if its config.json does not say."""
    record = config_json.get("aiakq")
    size = record.get("tp") if isinstance(record, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
