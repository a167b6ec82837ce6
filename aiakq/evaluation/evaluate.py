"""``aiakq eval``: perplexity on a text, and KL divergence from the original model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.errors import error
from aiakq.evaluation.text import WINDOW, load_windows
from aiakq.records import Record, environment

if TYPE_CHECKING:
    from torch import Tensor

    from aiakq.evaluation.scoring import ScoringModel

#: ``(stage, done, total, detail)``
OnProgress = Callable[[str, int, int, str], None]

_KEYS = ("perplexity", "perplexity_original", "perplexity_ratio", "kl", "top1_agreement", "tokens", "duration")


def run(options: EvalArguments, progress: OnProgress) -> Record:
    """Evaluate. Raises ``evaluation_text``, ``bad_option``, ``option_conflict`` and the errors of loading a model."""
    import torch

    from aiakq.evaluation.metrics import compare, perplexity
    from aiakq.evaluation.scoring import load_for_scoring

    started = time.perf_counter()
    progress("load", 0, 1, options.model)
    model = load_for_scoring(options.model, options.dtype, options.device, options.tokenizer)
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


def check_text_file(options: EvalArguments) -> None:
    """Raise ``evaluation_text`` if there is no such file."""
    if options.text is not None and not options.text.is_file():
        raise error("evaluation_text", reason=f"there is no file {options.text}")


def _windows(options: EvalArguments, model: ScoringModel) -> tuple[Tensor, str]:
    """Return the text as windows [W, T] of token ids, and its name."""
    longest = model.config.max_model_len
    if options.seqlen is not None and options.seqlen > longest:
        raise error(
            "bad_option",
            option="--seqlen",
            value=options.seqlen,
            expected=f"at most {longest}, the context of the model",
            hint="Leave it out for a length that fits.",
        )
    check_text_file(options)
    tokenizer = model.config.tokenizer.load().hf
    length, vocab_size = options.seqlen or min(WINDOW, longest), model.model.vocab_size
    windows, name = load_windows(options.text, tokenizer, length, vocab_size, options.limit)
    return windows, name if options.text is None else str(options.text)


def _check_pair(options: EvalArguments, model: ScoringModel, original: ScoringModel) -> None:
    if model.model.vocab_size != original.model.vocab_size:
        raise error(
            "option_conflict",
            option=f"--original {options.original}",
            other=options.model,
            reason=f"they predict {original.model.vocab_size} and {model.model.vocab_size} tokens",
            hint="Give the model that this one was quantized from.",
        )


def unmeasured(options: EvalArguments) -> dict[str, str]:
    """Return the keys that an evaluation with ``options`` leaves empty, with the reason, for gates."""
    if options.original is not None:
        return {}
    compared = ("perplexity_original", "perplexity_ratio", "kl", "top1_agreement")
    return dict.fromkeys(compared, "it compares with the original model; add --original MODEL")


def template() -> dict[str, object]:
    """Return the document of an empty run, with every key that a gate may name."""
    return Record("eval", 0, {}, dict.fromkeys(_KEYS), {}).document()
