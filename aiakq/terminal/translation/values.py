"""Conversions of values that several tables share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiakq.terminal.translation.rules import Changed, Unavailable, WithoutEffect

#: Drafts never change an answer here (docs/speculation.md), so that a method that is missing costs only time.
NO_DRAFTS = "there are no drafts of this kind; answers are the same without, only slower"
_METHODS = ("weight_only_int8", "smooth_quant", "awq", "gptq")
_DRAFT_METHODS = (
    *("ngram", "suffix", "draft_model", "eagle3"),
    *("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp"),
)


def mapped(values: Mapping[str, object], reason: str, *, others: bool = False) -> Callable[[str], object]:
    """Return a conversion by a table. None as a value means the default. ``others`` are passed on as they are."""

    def convert(value: str) -> object:
        if value in values:
            if values[value] is None:
                raise WithoutEffect("it is the default")
            return values[value]
        if others:
            return value
        raise Unavailable(f"{value}: {reason}")

    return convert


def number(value: str) -> object:
    """Return a number of a JSON object."""
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise Unavailable(f"{value!r} is no number") from None


def neutral(*values: float) -> Callable[[str], object]:
    """Return a conversion to a number that leaves out values that change nothing."""

    def convert(value: str) -> object:
        found = number(value)
        if found in values:
            raise WithoutEffect("the value changes nothing")
        return found

    return convert


def only_neutral(reason: str, *values: float) -> Callable[[str], object]:
    """Return a conversion that refuses all values but those that change nothing."""

    def convert(value: str) -> object:
        if number(value) in values:
            raise WithoutEffect("the value changes nothing")
        raise Unavailable(reason)

    return convert


def positive(value: str) -> object:
    """Return a count; 0 and below mean the default."""
    if isinstance(found := number(value), (int, float)) and found > 0:
        return value
    raise WithoutEffect("it is the default")


def json_object(value: str) -> object:
    """Return a JSON object."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise Unavailable(f"{value[:60]!r} is no JSON") from None
    if not isinstance(found, dict):
        raise Unavailable(f"{value[:60]!r} is no JSON object")
    return found


def comma_list(value: str) -> object:
    return [part for part in value.split(",") if part]


def files_model(value: str) -> object:
    """Return a folder, a GGUF file, an address in object storage, or a name on the hub."""
    from aiakq.formats import object_storage

    if "://" in value and not object_storage.is_url(value):
        raise Unavailable("models are folders, or names on Hugging Face's hub; mount or download it first")
    return value


def quantization(value: str) -> object:
    """Return a name of --quantization if checkpoints that agree with it can be read."""
    from aiakq.formats import quantization_names, unread_formats
    from aiakq.spec import canonical_method

    named = quantization_names.find(value)
    if canonical_method(value) in _METHODS:
        return value
    if value.lower() in ("none", "unquant"):
        raise WithoutEffect("the checkpoint's own config says how it is quantized")
    if named is None:
        raise Unavailable(f"{value} is no name of a format or kernel")
    if not named.containers:
        raise Unavailable(_round_once(named.rounding))
    if all(name in unread_formats.METHODS for name in named.containers) and "mxfp4" not in named.containers:
        instead = f"; {_round_once(named.rounding)}" if named.rounding else ""
        raise Unavailable(f"{unread_formats.METHODS[named.containers[0]]} is not read{instead}")
    return value


def _round_once(method: str | None) -> str:
    return f"16-bit weights are rounded once, by aiakq quantize -quant_type {method}, not at each start"


def drafts(value: str) -> object:
    """Return --speculative-config if its method is one that is available."""
    found: Any = json_object(value)
    method, model = found.get("method"), str(found.get("model") or "")
    if method is None and not model:
        raise WithoutEffect(NO_DRAFTS)
    if method is not None and method not in _DRAFT_METHODS and model not in ("ngram", "[ngram]"):
        raise WithoutEffect(NO_DRAFTS)
    return found


def kv_cache(values: Mapping[str, str]) -> Callable[[str], object]:
    """Return a conversion of dtypes of the KV cache; those of less than 8 bits become int8."""

    def convert(value: str) -> object:
        if value in values:
            return values[value]
        if any(mark in value for mark in ("4", "5", "3", "nvfp4", "int4")) and not value.startswith(("fp8", "bf", "f")):
            raise Changed("int8", "caches have 8 bits or more; int8 is more accurate, and takes more memory")
        return value

    return convert


#: Names of parsers in SGLang and vLLM -> the names here.
REASONING = {
    "deepseek-r1": "deepseek_r1",
    "deepseek_r1": "deepseek_r1",
    "qwen3": "qwen3",
    "qwen3-thinking": "qwen3",
    "gpt-oss": "gptoss",
    "openai_gptoss": "gptoss",
    "gptoss": "gptoss",
    "glm45": "glm45",
    "glm4_moe": "glm45",
    "mistral": "mistral",
    "granite": "granite",
}
TOOLS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "gpt-oss": "gptoss",
    "glm": "glm45",
    "kimi-k2": "kimi_k2",
    "glm4_moe": "glm45",
}


def tool_parser(value: str) -> object:
    from aiakq.server.api.tool_parsers import TOOL_PARSERS

    return _parser(value, TOOLS, list(TOOL_PARSERS), "tool calls")


def reasoning_parser(value: str) -> object:
    from aiakq.server.api.reasoning_parsers import REASONING_PARSERS

    return _parser(value, REASONING, list(REASONING_PARSERS), "reasoning")


def _parser(value: str, names: Mapping[str, str], known: list[str], what: str) -> object:
    if value == "auto":
        raise WithoutEffect("the parser is found from the chat template")
    name = names.get(value, value)
    if name not in known:
        raise Unavailable(f"there is no parser {value} of {what}; there are {', '.join(known)}")
    return name
