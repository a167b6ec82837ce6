"""Arguments of vLLM whose name or value is another one here, replaced with a notice. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.unsupported_row import Unsupported
from aiakq.errors import error


@dataclass(frozen=True)
class Renamed(Unsupported):
    """An argument that has another name.

    new    the keyword of the argument that replaces it.
    value  its value, for a switch; None: the value that was given.
    """

    new: str = ""
    value: Any = None

    @property
    def new_flag(self) -> str:
        return "--" + self.new.replace("_", "-")

    @property
    def replacement(self) -> str:
        return self.new_flag if self.value is None else f"{self.new_flag} {self.value}"


def _switch(name: str, new: str, value: str) -> Renamed:
    return Renamed(name, "", switch=True, new=new, value=value)


def _option(name: str, new: str, many: bool = False) -> Renamed:
    return Renamed(name, "", many=many, new=new)


RENAMED: tuple[Renamed, ...] = (
    _switch("worker_use_ray", "distributed_executor_backend", "ray"),
    _option("forced_num_gpu_blocks", "num_gpu_blocks_override"),
    _option("max_context_len_to_capture", "max_seq_len_to_capture"),
    _option("cuda_graph_sizes", "cudagraph_capture_sizes", many=True),
    _switch("guided_decoding_disable_any_whitespace", "structured_outputs_config", '{"disable_any_whitespace": true}'),
    _switch(
        "guided_decoding_disable_additional_properties",
        "structured_outputs_config",
        '{"disable_additional_properties": true}',
    ),
)
BY_NAME = {row.name: row for row in RENAMED}

#: (keyword, value of vLLM) -> the value here.
VALUES = {
    ("model_impl", "vllm"): "aiakq",
    ("load_format", "npcache"): "pt",
    ("load_format", "hf"): "auto",
    ("load_format", "bitsandbytes"): "auto",
    ("load_format", "fastsafetensors"): "safetensors",
    ("load_format", "instanttensor"): "safetensors",
}


def replaced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with their new names and values. Raises ``usage`` if an old and a new name are both given."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        row = BY_NAME.get(name)
        if row is not None and row.is_default(value):
            continue
        new = name if row is None else row.new
        if row is not None and row.value is not None:
            value = row.value
        if new in result or (row is not None and new in given):
            flags = " and ".join(other.flag for other in RENAMED if other.new == new and other.name in given)
            raise error("usage", reason=f"{flags} and --{new.replace('_', '-')} are the same.", hint="Give one.")
        result[new] = VALUES.get((new, value), value) if isinstance(value, str) else value
    return result


def notices(given: Mapping[str, Any]) -> list[str]:
    """Return a line for each argument with another name or value here."""
    lines = []
    for name, value in given.items():
        row = BY_NAME.get(name)
        if row is not None and not row.is_default(value):
            lines.append(f"{row.flag} is called {row.replacement} now.")
        elif isinstance(value, str) and (name, value) in VALUES:
            flag = "--" + name.replace("_", "-")
            lines.append(f"{flag} {value} is called {flag} {VALUES[name, value]} here.")
    return lines


def replaced_words(words: list[str], given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of a command line with new values, and words of the new names of ``given``; and the notices.

    words  as rewritten for the parser.
    given  values of options of RENAMED by name; others are ignored.
    Raises ``usage`` if an old and a new name are both given.
    """
    old = {name: value for name, value in given.items() if name in BY_NAME}
    flags = {"--" + name.replace("_", "-"): name for name, _ in VALUES}
    options = words[: words.index("--")] if "--" in words else words
    valued = {flags[flag]: value for flag, value in zip(options, options[1:], strict=False) if flag in flags}
    present = {row.new: None for row in RENAMED if row.new_flag in options}
    added = [
        word
        for name, value in replaced({**present, **old}).items()
        if name not in present
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    changed = list(words)
    for position, flag in enumerate(options[:-1]):
        if flag in flags:
            changed[position + 1] = VALUES.get((flags[flag], words[position + 1]), words[position + 1])
    return [*added, *changed], notices({**old, **valued})
