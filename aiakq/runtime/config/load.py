"""LoadConfig: which files are read, and how their weights are computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How a model is loaded, named as the arguments.

    path  the model folder, after downloads.
    """

    path: Path
    load_format: str = "auto"
    ignore_patterns: tuple[str, ...] = ()
    trust_remote_code: bool = False
    model_impl: str = "auto"
    dequantize: str = "auto"
    cpu_math: str = "fast"
    seed: int = 0
