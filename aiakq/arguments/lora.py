"""Arguments of LoRA adapters, with vLLM's names. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True)
class LoraModule:
    """An adapter of --lora-modules.

    base  the served model that it changes, if it is said.
    """

    name: str
    path: str
    base: str | None = None


def parse_module(text: str) -> LoraModule:
    """name=path, or a JSON object of name, path and base_model_name. Raises ValueError."""
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
    """``given``, if each is an adapter. Raises ValueError."""
    for text in given:
        parse_module(text)
    return given


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
