"""LoadConfig: which files are read, and how their weights are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import LoadArguments
from aiakq.formats.hub import resolve_model


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadArguments):
    """The arguments of loading, and the ``path`` of the model folder after downloads."""

    path: Path

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> LoadConfig:
        """Find the model, or download it. Raises model_*."""
        weights = "none" if args["load_format"] == "dummy" else args["load_format"]
        path = resolve_model(args["model"], args["revision"], args["download_dir"], weights, args["ignore_patterns"])
        return LoadConfig(**part_of(LoadConfig, args) | {"path": path})
