"""``eval``: perplexity of a model on a text, and how far its predictions are from those of the original."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.evaluation.records import Record, environment

if TYPE_CHECKING:
    from torch import Tensor

    from aiakq.evaluation.scoring import ScoringModel

#: Called with what is going on, steps done, steps in all, and what the step is about.
Progress = Callable[[str, int, int, str], None]

#: The window where the model's context allows it, and the tokens of text used: those of the report of ``quantize``.
WINDOW = 512
LIMIT = 64 * WINDOW
_KEYS = ("perplexity", "perplexity_original", "perplexity_ratio", "kl", "top1_agreement", "tokens", "duration")


@dataclass(frozen=True)
class QualityOptions:
    """What to evaluate.

    original  model to compare with; None measures perplexity only.
    text      UTF-8 text, .jsonl with ``text`` or .json list of strings; None takes the bundled held-out prose.
    seqlen    tokens per window; None: 512, or the model's context where that is shorter.
    limit     most tokens of text to use.
    """

    model: str
    original: str | None = None
    text: Path | None = None
    seqlen: int | None = None
    limit: int = LIMIT
    dtype: str = "float32"
    device: str = "auto"


def run(options: QualityOptions, progress: Progress) -> Record:
    """Evaluate. Raises ``evaluation_text``, ``bad_option``, ``option_conflict`` and all that loading a model raises."""
    import torch

    from aiakq.evaluation.metrics import compare, perplexity
    from aiakq.evaluation.scoring import load_for_scoring

    started = time.perf_counter()
    progress("load", 0, 1, options.model)
    model = load_for_scoring(options.model, options.dtype, options.device)
    windows, source = _windows(options, model)

    def on_window(done: int, total: int) -> None:
        progress("evaluate", done, total, "")

    metrics: dict[str, Any] = dict.fromkeys(_KEYS)
    if options.original is None:
        measured = perplexity(model, windows, on_window)
        metrics.update(perplexity=measured.value, tokens=measured.tokens)
    else:
        progress("load original", 0, 1, options.original)
        original = load_for_scoring(options.original, options.dtype, options.device)
        _check_pair(options, model, original)
        compared = compare(model, original, windows, on_window)
        metrics.update(asdict(compared))
        metrics["perplexity_ratio"] = compared.perplexity / compared.perplexity_original
    metrics["duration"] = time.perf_counter() - started
    where = environment(str(model.config.device.device), torch.get_num_threads())
    where["dtype"] = str(model.config.device.dtype).removeprefix("torch.")
    spec = model.config.spec
    config = {
        **asdict(options),
        "text": source,
        "seqlen": windows.shape[1],
        "windows": windows.shape[0],
        "quantization": "none" if spec is None else f"{spec.method}, {spec.describe()}",
    }
    return Record("eval", 0, config, metrics, where)


def _windows(options: QualityOptions, model: ScoringModel) -> tuple[Tensor, str]:
    """The text as windows [W, T] of token ids, and its name. Documents follow each other without special tokens."""
    import aiakq.data
    from aiakq.evaluation.metrics import windows
    from aiakq.quantizers.calibration.samples import read_documents, tokenize

    longest = model.config.max_model_len
    if options.seqlen is not None and options.seqlen > longest:
        raise error(
            "bad_option",
            option="--seqlen",
            value=options.seqlen,
            expected=f"at most {longest}, the context of the model",
            hint="Leave it away for a length that fits.",
        )
    if options.text is None:
        documents, name = [aiakq.data.text("heldout")], "the bundled held-out text"
    elif options.text.is_file():
        documents, name = read_documents(options.text), str(options.text)
    else:
        raise error("evaluation_text", reason=f"there is no file {options.text}")
    tokenizer = model.config.tokenizer.load()
    ids = [token for document in tokenize(documents, tokenizer.hf) for token in document]
    length = options.seqlen or min(WINDOW, longest)
    return windows(ids, length, max(1, options.limit // length)), name


def _check_pair(options: QualityOptions, model: ScoringModel, original: ScoringModel) -> None:
    if model.model.vocab_size != original.model.vocab_size:
        raise error(
            "option_conflict",
            option=f"--original {options.original}",
            other=options.model,
            reason=f"they predict {original.model.vocab_size} and {model.model.vocab_size} tokens",
            hint="Give the model that this one was quantized from.",
        )


def template() -> dict[str, Any]:
    """The document of a run without text: every key that a gate may name."""
    return Record("eval", 0, {}, dict.fromkeys(_KEYS), {}).document()
