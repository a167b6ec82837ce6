"""Options of ``aiakq eval`` and ``aiakq inspect``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import argument
from aiakq.arguments.common import device_argument, revision_argument


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """How good a model is."""

    model: str = argument(..., "Folder, or hub name (org/name).", positional=True, metavar="MODEL")
    original: str | None = argument(None, "Also compare its predictions with this model's.", metavar="MODEL")
    text: Path | None = argument(None, "Text to predict; a bundled held-out text if not given.", metavar="FILE")
    seqlen: int | None = argument(None, "Tokens per window; 512, or the context if shorter.", low=2)
    limit: int = argument(32768, "Most tokens of the text.", low=2)
    dtype: str = argument("float32", "Dtype of what is not quantized; auto as for serve.")
    device: str = device_argument()


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """What a checkpoint is."""

    model: str = argument(..., "Folder, or hub name (org/name).", positional=True, metavar="MODEL")
    all: bool = argument(False, "One row per layer, instead of one for all equal layers.")
    device: str = device_argument()
    dtype: str = argument("auto", "Dtype of activations.")
    revision: str | None = revision_argument()
