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
    by_ray                  whether Ray places the other ranks; else they are child processes.
    timeout                 seconds that a rank waits for another within a step.
    arguments               the engine's, as they were given: every rank makes its own configuration of them.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    layer_partition: tuple[int, ...] | None
    by_ray: bool
    timeout: float
    arguments: Mapping[str, Any] = field(repr=False)  # the token of the hub among them

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @staticmethod
    def from_args(args: Mapping[str, Any], given: Mapping[str, Any]) -> ParallelConfig:
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
        return ParallelConfig(
            args["tensor_parallel_size"],
            args["pipeline_parallel_size"],
            args["pp_layer_partition"],
            backend == "ray",
            args["distributed_timeout_seconds"],
            dict(given),
        )
