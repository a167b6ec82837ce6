"""Options shared by several commands. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class JsonArguments:
    """Option for JSON output."""

    json: bool = argument(False, "Print one JSON document on stdout.")


@dataclass(frozen=True, kw_only=True)
class ResultArguments:
    """Options for the result of a measurement."""

    output: Path | None = argument(
        None, "Also write the JSON to this file, atomically.", flags=("--output", "--output-json"), metavar="FILE"
    )
    fail_if: tuple[str, ...] = argument(
        (),
        "Exit with code 10 if this condition holds, like 'tpot_ms.p50>50': a key of the JSON result, an operator, "
        "and a number, a percentage (99%) or a change from --baseline (+5%).",
        metavar="GATE",
    )
    baseline: Path | None = argument(
        None, "JSON of an earlier run of the same command, for --fail-if 'tpot_ms.p50>+5%'.", metavar="FILE"
    )
    strict: bool = argument(
        False, "Exit with code 10 if the result has a warning, for example about prefix-cache hits."
    )


@dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    """Option for a configuration file."""

    config: Path | None = argument(
        None,
        "YAML file with option values, a line with name: value for each.",
        metavar="FILE",
    )


#: What names a model, everywhere.
MODEL = (
    "a folder, a hub name (org/name), a GGUF file or one of several (FOLDER:Q8_0, org/name:Q8_0), or one in object "
    "storage (s3://bucket/folder, gs://)"
)


def device_argument() -> Any:
    """Declare the field of --device."""
    return argument("auto", "auto: cuda if available, else cpu.", metavar="auto|cpu|cuda")


def shard_size_argument(group: str = "") -> Any:
    """Declare the field of --max-shard-size."""
    return argument(
        None,
        "Largest size of a file of weights, like 5GB; a larger tensor is alone in its file. A GGUF file becomes "
        "several, as llama-gguf-split makes them, unless all fits into one. If not given, 5GB in a folder, and one "
        "GGUF file.",
        metavar="SIZE",
        group=group,
    )


def revision_argument() -> Any:
    """Declare the field of --revision."""
    return argument(None, "Branch, tag or commit of a hub model.")
