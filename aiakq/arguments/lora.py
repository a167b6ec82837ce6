"""Arguments of LoRA adapters, with vLLM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """Which adapters may be in memory, and in a step."""

    enable_lora: bool = argument(
        False,
        "Let requests use LoRA adapters that PEFT saved. Those of several requests are computed in the same steps, "
        "each for its own rows; other rows keep their results to the bit.",
    )
    max_loras: int = argument(1, "Most different adapters in a step; requests with others wait.", low=1, high=4096)
    max_lora_rank: int = argument(16, "Adapters with a larger rank are refused.", low=1, high=4096)
    max_cpu_loras: int | None = argument(
        None,
        "Most adapters in memory; the one that was not used for longest makes room. --max-loras if not given.",
        low=1,
        high=65536,
    )
    max_lora_bytes: int | None = argument(
        None,
        "Most bytes of adapters in memory, as their files count them; if not given, what --max-cpu-loras adapters of "
        "--max-lora-rank on every linear layer take. So much is kept free when KV pages are counted.",
        low=1,
        suffixes=True,
    )
    lora_dtype: str = argument(
        "auto",
        "Dtype of adapters in memory; auto: that of their file. Sums are float32 in either.",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
