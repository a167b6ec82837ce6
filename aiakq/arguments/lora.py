"""Arguments of LoRA adapters, with vLLM's names. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from aiakq.arguments.argument import argument


@dataclass(frozen=True)
class LoraModule:
    """An adapter of --lora-modules.

    base  name of the served model it belongs to, or None.
    """

    name: str
    path: str
    base: str | None = None


def parse_module(text: str) -> LoraModule:
    """Parse ``name=path``, or a JSON object with name, path and base_model_name. Raises ValueError."""
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        values = {"name": name, "path": path}
    else:
        values = json.loads(text)
    known = {"name", "path", "base_model_name"}
    if not set(values) <= known or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(text)
    if not values.get("name") or not values.get("path"):
        raise ValueError(text)
    return LoraModule(values["name"], values["path"], values.get("base_model_name"))


def checked_modules(given: list[str]) -> list[str]:
    """Return ``given`` if every entry is valid. Raises ValueError."""
    for text in given:
        parse_module(text)
    return given


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """LoRA adapters, and how many of them may be in memory and in a step."""

    enable_lora: bool = argument(
        False,
        "Let requests use LoRA adapters in PEFT's format. A step can combine requests with different adapters; outputs "
        "of requests without one stay bit-identical.",
    )
    max_loras: int = argument(
        1, "Maximum number of different adapters in a step; requests with others wait.", low=1, high=4096
    )
    max_lora_rank: int = argument(16, "Adapters with a larger rank are refused.", low=1, high=4096)
    max_cpu_loras: int | None = argument(
        None,
        "Maximum number of adapters in memory; the least recently used one is evicted. --max-loras if not given.",
        low=1,
        high=65536,
    )
    max_lora_bytes: int | None = argument(
        None,
        "Maximum size of the adapters in memory in bytes, as stored in their files; if not given, that of "
        "--max-cpu-loras adapters of rank --max-lora-rank on every linear layer. The KV cache leaves this much memory "
        "free, and on CPUs also that of a few adapters that are read ahead.",
        low=1,
        suffixes=True,
    )
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = argument(
        "auto",
        "Dtype of adapters in memory; auto: that of their files. Sums are accumulated in float32.",
    )
