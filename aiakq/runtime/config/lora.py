"""LoraConfig: how many LoRA adapters there may be. Standard library only, like the scheduler's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error

#: Adapters at most that are read ahead of the step that loads them.
_MAX_STAGED = 4


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Limits on LoRA adapters.

    max_loras      different ones in a step.
    max_resident   in memory; ``max_bytes``: their files' bytes, None: no limit.
    max_rank       of each.
    dtype          in memory; auto: that of the file.
    """

    max_loras: int = 1
    max_resident: int = 1
    max_bytes: int | None = None
    max_rank: int = 16
    dtype: str = "auto"

    def describe(self) -> str:
        """The limits, for the start-up table."""
        return f"up to {self.max_loras} in a step, {self.max_resident} in memory, of rank {self.max_rank} at most"

    @property
    def max_staged(self) -> int:
        """How many adapters are read and kept, beside those in memory, before a step loads them."""
        return min(self.max_loras + 1, _MAX_STAGED)

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> LoraConfig | None:
        """None without adapters. Raises ``option_conflict``."""
        if not args["enable_lora"]:
            return None
        most, resident = args["max_loras"], args["max_cpu_loras"]
        if resident is not None and resident < most:
            raise error(
                "option_conflict",
                option=f"--max-cpu-loras {resident}",
                other=f"--max-loras {most}",
                reason="adapters of a step are in memory",
                hint=f"At least {most} is possible.",
            )
        if args["model_impl"] == "transformers":
            reason = "adapters are computed beside the linear layers of aiakq's own models"
            raise error(
                "option_conflict", option="--enable-lora", other="--model-impl transformers", reason=reason, hint=""
            )
        if args["tensor_parallel_size"] > 1 and args["tensor_parallel_math"] == "fast":
            raise error(
                "option_conflict",
                option="--enable-lora",
                other="--tensor-parallel-math fast",
                reason="adapters are added to whole outputs, which ranks put side by side",
                hint="Use --tensor-parallel-math exact.",
            )
        return LoraConfig(
            max_loras=most,
            max_resident=resident or most,
            max_bytes=args["max_lora_bytes"],
            max_rank=args["max_lora_rank"],
            dtype=args["lora_dtype"],
        )
