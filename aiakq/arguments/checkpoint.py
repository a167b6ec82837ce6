"""Options of ``aiakq eval``, ``aiakq inspect`` and ``aiakq convert``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import argument
from aiakq.arguments.common import MODEL, device_argument, revision_argument
from aiakq.arguments.convert import ConvertArguments as ConvertArguments
from aiakq.arguments.model_comparison import ModelComparisonArguments as ModelComparisonArguments


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Options of ``aiakq eval``."""

    model: str = argument(..., f"The model: {MODEL}.", positional=True, metavar="MODEL")
    versus: tuple[str, ...] = argument(
        (),
        "Other quantized models of the same original, to compare MODEL with.",
        positional=True,
        metavar="[VERSUS...]",
        separator="\0",
    )
    original: str | None = argument(
        None,
        "The model that MODEL was quantized from, to compare predictions with.",
        flags=("--original", "--against"),
        metavar="MODEL",
    )
    text: tuple[str, ...] = argument(
        (),
        "Text to evaluate on: a file, or prose, dialogue or code for a bundled one; all three if not given.",
        metavar="FILE",
    )
    seqlen: int | None = argument(None, "Tokens per window; 512, or the context if shorter.", low=2)
    limit: int = argument(32768, "Maximum number of tokens of each text.", low=2)
    dtype: str = argument("float32", "Dtype of tensors that are not quantized; auto: as for serve.")
    kv_cache_dtype: str = argument(
        "auto", "Dtype of the KV cache of MODEL and VERSUS, as for serve; the original's is always --dtype."
    )
    device: str = device_argument()
    tokenizer: str | None = argument(None, "Tokenizer folder or hub name; the model's own if not given.")
    tasks: tuple[str, ...] = argument(
        (), "Also run these tasks of lm-eval (pip install 'aiakq[eval]'), like hellaswag.", metavar="TASK"
    )
    include_path: Path | None = argument(None, "Folder with definitions of further tasks.", metavar="DIR")
    num_fewshot: int | None = argument(None, "Number of examples in the prompts of --tasks; each task's own.", low=0)
    task_limit: int | None = argument(None, "Run only the first N items of each task.", low=1)


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """Options of ``aiakq inspect``."""

    model: str = argument(..., f"The model: {MODEL}.", positional=True, metavar="MODEL")
    all: bool = argument(False, "Show one row per layer instead of one for all equal layers.")
    device: str = device_argument()
    dtype: str = argument("auto", "Dtype of activations.")
    fit: str | None = argument(
        None,
        "Say whether the model fits a machine, as it is and in each scheme; exit with code 5 if it does not: a size "
        "(8GB, 24GiB), here, or a GPU (H100, A100-40, L4, 'RTX 4090').",
        metavar="MACHINE",
    )
    fit_context: int | None = argument(
        None,
        "--fit: tokens that a sequence must be able to have; the model's context if not given.",
        low=1,
        hint="",
    )
    revision: str | None = revision_argument()
