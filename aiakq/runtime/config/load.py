"""LoadConfig: the files to load, and how their weights are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import LoadArguments
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import check_files


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadArguments):
    """Arguments of loading, and the ``path`` of the local model folder."""

    path: Path

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> LoadConfig:
        """Find or download the model. Raises ``model_*`` and ``path_outside_model``."""
        weights = "none" if args["load_format"] == "dummy" else args["load_format"]
        cache, ignore = args["download_dir"], args["ignore_patterns"]
        path = resolve_model(args["model"], args["revision"], cache, weights, ignore, args["hf_token"])
        check_files(path)
        return LoadConfig(**part_of(LoadConfig, args) | {"path": path})
