"""``aiakq eval``: perplexity on several texts, and divergence from the original model; tasks of lm-eval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.data.evaluation_texts import BUNDLED, check_sources
from aiakq.data.tokens import tokenize
from aiakq.errors import AiakqError, error
from aiakq.evaluation.tasks import check_installed, run_tasks, task_rows
from aiakq.evaluation.text import WINDOW, EvaluationText, load_texts
from aiakq.evaluation.wording import DECIDES, MIXED, WORSE
from aiakq.records import Record, environment
from aiakq.runtime.text.tokenizer_files import has_tokenizer

if TYPE_CHECKING:
    from aiakq.evaluation.metrics import Comparison
    from aiakq.evaluation.scoring import ScoringModel

#: ``(stage, done, total, detail)``
OnProgress = Callable[[str, int, int, str], None]

#: The figures of the first text that are numbers of the document, so that gates may name them.
NUMBERS = (
    *("perplexity", "perplexity_original", "perplexity_ratio", "kl", "kl_median", "kl_p99", "kl_p999", "kl_max"),
    *("top1_agreement", "tokens"),
)
#: Their intervals: objects of ``low`` and ``high``.
INTERVALS = (
    *("perplexity_interval", "perplexity_ratio_interval", "kl_interval", "kl_p99_interval", "kl_max_interval"),
    "top1_agreement_interval",
)
#: Numbers that need no original model.
_ALONE = ("perplexity", "perplexity_interval", "tokens")


def check(options: EvalArguments) -> None:
    """Raise ``evaluation_text``, ``option_conflict``, ``no_lm_eval`` or ``bad_option`` for options that cannot work."""
    check_sources(options.text)
    check_installed(options)
    if options.versus and options.original is None:
        raise error(
            "option_conflict",
            option=" ".join((options.model, *options.versus)),
            other="no --original",
            reason="models are compared by their divergence from the same original",
            hint="Give --original MODEL.",
        )
    seen: dict[Path, str] = {}
    for model in (options.model, *options.versus):
        folder = Path(model).resolve()
        if folder in seen:
            reason = "a model is not compared with itself"
            raise error("option_conflict", option=model, other=seen[folder], reason=reason, hint="Name it once.")
        seen[folder] = model


def run(options: EvalArguments, progress: OnProgress) -> Record:
    """Evaluate. Raises as ``check``, ``bad_option`` for too long windows, and the errors of loading a model."""
    import torch

    from aiakq.evaluation.intervals import CONFIDENCE, RESAMPLES, SEED

    check(options)
    started = time.perf_counter()
    evaluation = _Evaluation(options, progress)
    model, texts = evaluation.models[options.model], evaluation.texts
    where = environment(str(model.config.device.device), torch.get_num_threads())
    where["dtype"] = str(model.config.device.dtype).removeprefix("torch.")
    config = {
        **asdict(options),
        "text": ", ".join(options.text if options.text else [text.title for text in texts]),
        "texts": [text.name for text in texts],
        "seqlen": texts[0].windows.shape[1],
        "windows": texts[0].windows.shape[0],
        "quantization": quantization_of(model),
        "bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE, "seed": SEED},
    }
    del model
    metrics = evaluation.measured()
    if options.tasks:
        del evaluation
        metrics["tasks"] = _tasks(options, progress)
    metrics["duration"] = time.perf_counter() - started
    return Record("eval", SEED, config, metrics, where)


class _Evaluation:
    """Measures the models of an evaluation on its texts, with at most two models in memory."""

    def __init__(self, options: EvalArguments, progress: OnProgress) -> None:
        self.options, self.progress = options, progress
        self.models: dict[str, ScoringModel] = {}
        model = self._load(options.model)
        self.tokenizer = model.config.tokenizer.load().hf
        self.vocab_size = model.model.vocab_size
        self.texts = _texts(options, model, self.tokenizer)

    def measured(self) -> dict[str, Any]:
        """Return the metrics of the document, as JSON values."""
        options = self.options
        if options.original is None:
            texts = self._alone()
            return {**_first(texts), "texts": texts, "remarks": []}
        compared = {options.model: self._compared(options.model)}
        texts = self._documents(compared[options.model])
        versus = []
        for other in options.versus:
            self.models = {name: model for name, model in self.models.items() if name == options.original}
            quantization = quantization_of(self._load(other))
            compared[other] = self._compared(other)
            documents = self._documents(compared[other])
            about = {"model": other, "quantization": quantization}
            versus.append({**about, **_first(documents), "texts": documents})
        comparisons = [self._paired(compared, other) for other in options.versus]
        remarks = [DECIDES, *(text["remark"] for text in texts if text["remark"])]
        return {
            **_first(texts),
            "texts": texts,
            "versus": versus,
            "comparisons": comparisons,
            "worse_than": sum(each["verdict"] in (WORSE, MIXED) for each in comparisons) if versus else None,
            "remarks": remarks,
        }

    def _load(self, model: str, as_original: bool = False) -> ScoringModel:
        from aiakq.evaluation.scoring import load_for_scoring

        options = self.options
        self.progress("load original" if as_original else "load", 0, 1, model)
        tokenizer = options.tokenizer if model == options.model else None
        cache = "auto" if as_original else options.kv_cache_dtype
        loaded = load_for_scoring(model, options.dtype, options.device, tokenizer, cache)
        if model != options.model:
            self._check_texts(model, loaded)
        self.models[model] = loaded
        return loaded

    def _check_texts(self, name: str, model: ScoringModel) -> None:
        """Raise ``bad_option`` or ``option_conflict`` if the windows of the texts are not for another model as well."""
        options = self.options
        option = f"--original {name}" if name == options.original else name
        counts = model.model.vocab_size, self.vocab_size
        if counts[0] != counts[1]:
            raise error(
                "option_conflict",
                option=option,
                other=options.model,
                reason=f"they predict {counts[0]} and {counts[1]} tokens",
                hint="Compare quantized models of the same original with that original.",
            )
        length = max(text.windows.shape[1] for text in self.texts)
        if length > model.config.max_model_len:
            raise _too_long(length, model.config.max_model_len, name)
        if options.tokenizer is not None or not has_tokenizer(model.config.load.path):
            return
        theirs = model.config.tokenizer.load().hf
        for text in self.texts:
            sample = [self.tokenizer.decode(text.windows[0])]
            if tokenize(sample, self.tokenizer) != tokenize(sample, theirs):
                raise error(
                    "option_conflict",
                    option=option,
                    other=options.model,
                    reason=f"their tokenizers divide {text.title} into different tokens",
                    hint="Compare quantized models of the same original, or name their tokenizer with --tokenizer.",
                )

    def _alone(self) -> list[dict[str, Any]]:
        from aiakq.evaluation.metrics import perplexity
        from aiakq.evaluation.text_quality import perplexity_document

        model = self.models[self.options.model]
        return [
            perplexity_document(text, perplexity(model, text.windows, self._on_window(text))) for text in self.texts
        ]

    def _compared(self, name: str) -> list[Comparison]:
        """Return the comparison of a loaded model with the original on each text."""
        from aiakq.evaluation.metrics import compare

        assert self.options.original is not None
        model, original = self.models[name], self.models.get(self.options.original)
        if original is None or name == self.options.original:
            original = self._load(self.options.original, as_original=True)
        return [compare(model, original, text.windows, self._on_window(text)) for text in self.texts]

    def _documents(self, compared: list[Comparison]) -> list[dict[str, Any]]:
        from aiakq.evaluation.text_quality import comparison_document

        return [
            comparison_document(text, each, self.tokenizer) for text, each in zip(self.texts, compared, strict=True)
        ]

    def _paired(self, compared: dict[str, list[Comparison]], other: str) -> dict[str, Any]:
        from aiakq.evaluation.text_quality import overall, paired_document

        model = self.options.model
        each = zip(self.texts, compared[model], compared[other], strict=True)
        texts = [paired_document(text, ours, theirs) for text, ours, theirs in each]
        verdict = overall([text["verdict"] for text in texts])
        return {"model": model, "versus": other, "verdict": verdict, "texts": texts}

    def _on_window(self, text: EvaluationText) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(f"evaluate {text.name}", done, total, "")


def _first(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the first text, under the names that gates know; None if not measured."""
    return {key: texts[0].get(key) for key in (*NUMBERS, *INTERVALS)}


def _tasks(options: EvalArguments, progress: OnProgress) -> list[dict[str, Any]]:
    """Run the tasks with every model; return the rows of each model, compared with the original."""
    original = None
    if options.original is not None:
        progress("tasks of the original", 0, 1, options.original)
        original = run_tasks(options.original, replace(options, kv_cache_dtype="auto"))
    rows = []
    for model in (options.model, *options.versus):
        progress(f"tasks of {model}", 0, 1, "")
        rows += [{"model": model, **row} for row in task_rows(run_tasks(model, options), original)]
    return rows


def quantization_of(model: ScoringModel) -> str:
    """Describe how a model is quantized."""
    spec = model.config.spec
    return "none" if spec is None else f"{spec.method}, {spec.describe()}"


def _texts(options: EvalArguments, model: ScoringModel, tokenizer: object) -> list[EvaluationText]:
    longest = model.config.max_model_len
    if options.seqlen is not None and options.seqlen > longest:
        raise _too_long(options.seqlen, longest, options.model)
    length, vocab_size = options.seqlen or min(WINDOW, longest), model.model.vocab_size
    return load_texts(options.text or tuple(BUNDLED), tokenizer, length, vocab_size, options.limit)


def _too_long(length: int, longest: int, model: str) -> AiakqError:
    expected = f"at most {longest}, the context of {model}"
    return error("bad_option", option="--seqlen", value=length, expected=expected, hint=f"Give --seqlen {longest}.")


def unmeasured(options: EvalArguments) -> dict[str, str]:
    """Return the keys that an evaluation with ``options`` leaves empty, with the reason, for gates."""
    reasons = {}
    if options.original is None:
        compared = [key for key in (*NUMBERS, *INTERVALS) if key not in _ALONE]
        reasons = dict.fromkeys(compared, "it compares with the original model; add --original MODEL")
    if not options.versus:
        reasons["worse_than"] = "it compares with other quantized models; name them after MODEL"
    return reasons


def template() -> dict[str, object]:
    """Return the document of an empty run, with every key that a gate may name."""
    bounds = {"low": None, "high": None}
    numbers = dict.fromkeys((*NUMBERS, "worse_than", "duration"))
    return Record("eval", 0, {}, {**numbers, **dict.fromkeys(INTERVALS, bounds)}, {}).document()


def by_text(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each text, by its name."""
    return {text["name"]: text for text in document.get("texts", ())}
