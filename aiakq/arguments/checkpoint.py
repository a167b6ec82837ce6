"""Options of ``aiakq eval`` and ``aiakq inspect``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import argument
from aiakq.arguments.common import device_argument, revision_argument


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Options of ``aiakq eval``."""

    model: str = argument(..., "Folder, or hub name (org/name).", positional=True, metavar="MODEL")
    original: str | None = argument(None, "Also compare the predictions with those of this model.", metavar="MODEL")
    text: Path | None = argument(None, "Text to evaluate on; a bundled held-out text if not given.", metavar="FILE")
    seqlen: int | None = argument(None, "Tokens per window; 512, or the context if shorter.", low=2)
    limit: int = argument(32768, "Maximum number of tokens of the text.", low=2)
    dtype: str = argument("float32", "Dtype of tensors that are not quantized; auto: as for serve.")
    device: str = device_argument()
    tokenizer: str | None = argument(None, "Tokenizer folder or hub name; the model's own if not given.")


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """Options of ``aiakq inspect``."""

    model: str = argument(..., "Folder, or hub name (org/name).", positional=True, metavar="MODEL")
    all: bool = argument(False, "Show one row per layer instead of one for all equal layers.")
    device: str = device_argument()
    dtype: str = argument("auto", "Dtype of activations.")
    revision: str | None = revision_argument()
