"""ParallelConfig: the tensor and pipeline parallelism of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks that compute one model together.

    tensor_parallel_size    number of ranks that each layer is sharded over.
    pipeline_parallel_size  number of stages that the layers are split into.
    layer_partition         number of layers of each stage; None to balance their times.
    math                    ``fast`` (row-parallel layers with all-reduce) or ``exact`` (all-gather only, with the same
                            bits for any number of ranks).
    by_ray                  whether Ray places the other ranks; otherwise they are child processes.
    timeout                 time limit in seconds for a rank to wait for another within a step.
    arguments               engine arguments, from which every rank creates its own configuration.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    layer_partition: tuple[int, ...] | None
    math: str
    by_ray: bool
    timeout: float
    arguments: EngineArguments = field(repr=False)  # may contain the hub token

    @property
    def world_size(self) -> int:
        """Number of ranks: tensor parallel size times pipeline parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @staticmethod
    def from_args(args: EngineArguments, device_type: str) -> ParallelConfig:
        """Raises ``option_conflict`` and ``option_refused``."""
        backend = args.distributed_executor_backend
        count = args.tensor_parallel_size * args.pipeline_parallel_size
        if backend == "external_launcher":
            reason = "rank 0 starts and controls the other ranks itself"
            raise error("option_refused", option="--distributed-executor-backend external_launcher", reason=reason)
        if backend == "uni" and count > 1:
            raise error(
                "option_conflict",
                option="--distributed-executor-backend uni",
                other=f"-tp {args.tensor_parallel_size} -pp {args.pipeline_parallel_size}",
                reason=f"these sizes need {count} processes",
                hint="Use mp, or ray for several machines.",
            )
        math = args.tensor_parallel_math
        if math == "auto":
            # LoRA products are added to complete outputs, not to partial sums.
            math = "fast" if device_type == "cuda" and not args.enable_lora else "exact"
        return ParallelConfig(
            args.tensor_parallel_size,
            args.pipeline_parallel_size,
            args.pp_layer_partition,
            math,
            backend == "ray",
            args.distributed_timeout_seconds,
            args,
        )

    def remark(self, config_json: Mapping[str, object]) -> str | None:
        """Return a note if the checkpoint was quantized for another tensor-parallel size, else None."""
        planned = planned_size(config_json)
        if planned in (None, 1, self.tensor_parallel_size):
            return None
        return f"served with -tp {self.tensor_parallel_size}, quantized for -tp {planned}"


def planned_size(config_json: Mapping[str, object]) -> int | None:
    """Return the tensor-parallel size that ``aiakq quantize`` prepared a checkpoint for; None if not recorded."""
    record = config_json.get("aiakq")
    size = record.get("tp") if isinstance(record, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
