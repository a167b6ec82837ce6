"""ParallelConfig: over how many processes a model is distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.errors import error


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks that compute one model together.

    tensor_parallel_size    processes that share each layer.
    pipeline_parallel_size  groups of such processes, each with some of the layers.
    layer_partition         layers of each group; None: so that they take equally long.
    math                    fast or exact: whether ranks add up parts of results, or put parts side by side.
    by_ray                  whether Ray places the other ranks; else they are child processes.
    timeout                 seconds that a rank waits for another within a step.
    arguments               the engine's, as they were given: every rank makes its own configuration of them.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    layer_partition: tuple[int, ...] | None
    math: str
    by_ray: bool
    timeout: float
    arguments: Mapping[str, Any] = field(repr=False)  # the token of the hub among them

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @staticmethod
    def from_args(args: Mapping[str, Any], given: Mapping[str, Any], device_type: str) -> ParallelConfig:
        """args: checked ones; given: those that were. Raises ``option_conflict`` and ``option_refused``."""
        backend = args["distributed_executor_backend"]
        count = args["tensor_parallel_size"] * args["pipeline_parallel_size"]
        if backend == "external_launcher":
            reason = "rank 0 starts the other ranks, which do what it decides"
            raise error("option_refused", option="--distributed-executor-backend external_launcher", reason=reason)
        if backend == "uni" and count > 1:
            raise error(
                "option_conflict",
                option="--distributed-executor-backend uni",
                other=f"-tp {args['tensor_parallel_size']} -pp {args['pipeline_parallel_size']}",
                reason=f"these are {count} processes",
                hint="Use mp, or ray for several machines.",
            )
        math = args["tensor_parallel_math"]
        if math == "auto":
            # Adapters are added to whole outputs.
            math = "fast" if device_type == "cuda" and not args["enable_lora"] else "exact"
        return ParallelConfig(
            args["tensor_parallel_size"],
            args["pipeline_parallel_size"],
            args["pp_layer_partition"],
            math,
            backend == "ray",
            args["distributed_timeout_seconds"],
            dict(given),
        )

    def remark(self, config_json: Mapping[str, Any]) -> str | None:
        """What to tell whoever serves a checkpoint with another tensor-parallel size than it was quantized for."""
        planned = planned_size(config_json)
        if planned in (None, 1, self.tensor_parallel_size):
            return None
        return f"served with -tp {self.tensor_parallel_size}, quantized for -tp {planned}"


def planned_size(config_json: Mapping[str, Any]) -> int | None:
    """The tensor-parallel size that ``aiakq quantize`` made a checkpoint for; None if its config.json does not say."""
    record = config_json.get("aiakq")
    size = record.get("tp") if isinstance(record, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
