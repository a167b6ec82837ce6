"""LoraConfig: limits on LoRA adapters. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error

#: Maximum number of adapters that are read ahead of the step that loads them.
_MAX_STAGED = 4


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Limits on LoRA adapters.

    max_loras     different adapters in a step.
    max_resident  adapters in memory.
    max_bytes     bytes of their files; None: no limit.
    max_rank      rank of an adapter.
    dtype         dtype in memory; auto: that of the file.
    """

    max_loras: int = 1
    max_resident: int = 1
    max_bytes: int | None = None
    max_rank: int = 16
    dtype: str = "auto"

    def describe(self) -> str:
        """Return the limits as text for the start-up table."""
        return f"up to {self.max_loras} in a step, {self.max_resident} in memory, of rank up to {self.max_rank}"

    @property
    def max_staged(self) -> int:
        """Return how many adapters are read ahead, in addition to those in memory."""
        return min(self.max_loras + 1, _MAX_STAGED)

    @staticmethod
    def from_args(args: EngineArguments) -> LoraConfig | None:
        """Return the limits; None without ``--enable-lora``. Raises ``option_conflict``."""
        if not args.enable_lora:
            return None
        max_loras, resident = args.max_loras, args.max_cpu_loras
        if resident is not None and resident < max_loras:
            raise error(
                "option_conflict",
                option=f"--max-cpu-loras {resident}",
                other=f"--max-loras {max_loras}",
                reason="the adapters of a step must be in memory",
                hint=f"Use at least {max_loras}.",
            )
        if args.model_impl == "transformers":
            reason = "adapters are computed beside the linear layers of aiakq's own models"
            raise error(
                "option_conflict", option="--enable-lora", other="--model-impl transformers", reason=reason, hint=""
            )
        if args.tensor_parallel_size > 1 and args.tensor_parallel_math == "fast":
            raise error(
                "option_conflict",
                option="--enable-lora",
                other="--tensor-parallel-math fast",
                reason="adapters are added to whole outputs, which ranks put side by side",
                hint="Use --tensor-parallel-math exact.",
            )
        return LoraConfig(
            max_loras=max_loras,
            max_resident=resident or max_loras,
            max_bytes=args.max_lora_bytes,
            max_rank=args.max_lora_rank,
            dtype=args.lora_dtype,
        )
