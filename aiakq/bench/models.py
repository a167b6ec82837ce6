"""``aiakq compare``: size, bits per weight, divergence, perplexity and speed of several models in one table."""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.arguments.model_comparison import ModelComparisonArguments
from aiakq.bench import workload
from aiakq.bench.offline import MeasuredEngine
from aiakq.errors import error
from aiakq.evaluation import evaluate
from aiakq.evaluation.wording import DECIDES, change_text, interval_text, kl_text
from aiakq.formats.checkpoint import Checkpoint
from aiakq.html_report.numbers import size
from aiakq.html_report.render import render
from aiakq.records import Record, to_json
from aiakq.runtime.config.engine import EngineConfig

#: ``(stage, done, total, detail)``
OnProgress = Callable[[str, int, int, str], None]
#: Prompts are random, and the same for all models.
_SEED = 0
#: Columns of the table: heading, and the figure of a row as text.
COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("model", lambda row: str(row["model"])),
    ("quantization", lambda row: str(row["quantization"])),
    ("size", lambda row: size(row["bytes"])),
    ("bits", lambda row: f"{row['bits_per_weight']:.2f}"),
    ("KL", lambda row: "-" if row["kl"] is None else kl_text(row["kl"])),
    ("95 %", lambda row: interval_text(row["kl_interval"])),
    ("perplexity", lambda row: "-" if row["perplexity"] is None else f"{row['perplexity']:,.4g}"),
    ("change", lambda row: "-" if row["perplexity_ratio"] is None else change_text(row["perplexity_ratio"])),
    ("tokens/s", lambda row: "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.1f}"),
)
OTHER_TOKENS = (
    "The models divide the text into different numbers of tokens: their perplexities, which are per token, cannot be "
    "compared."
)
_FIGURES = ("kl", "kl_interval", "perplexity", "perplexity_interval", "perplexity_ratio")


def check(options: ModelComparisonArguments) -> None:
    """Raise ``bad_option``, ``option_conflict``, ``output_failed`` or ``evaluation_text`` for wrong options."""
    if not all(name.strip() for name in options.models):
        expected = "a folder or a hub name"
        raise error("bad_option", option="MODEL", value="", expected=expected, hint="Example: aiakq compare OUT OTHER")
    evaluate.check(_evaluation(options, *options.models))
    for path in options.paths:
        if path.suffix not in _WRITERS:
            expected = f"a file that ends in {', '.join(_WRITERS)}"
            raise error("bad_option", option="--output", value=str(path), expected=expected, hint="")
        if not path.absolute().parent.is_dir():
            raise error("output_failed", path=path, reason="its folder does not exist")
        if path.is_dir():
            raise error("output_failed", path=path, reason="it is a folder")
        try:  # permissions say nothing of /proc, or of a file system that is read-only
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as problem:
            reason = f"its folder cannot be written to ({problem.strerror})"
            raise error("output_failed", path=path, reason=reason) from None


def run(options: ModelComparisonArguments, progress: OnProgress) -> Record:
    """Measure all models. Raises as ``check``, and the errors of reading, loading and evaluating a model."""
    check(options)
    rows = [_stored(model) for model in options.models]
    _check_lengths(options)
    found, environment = _quality(options, progress)
    speeds = _speeds(options, progress) if options.speed else [None] * len(rows)
    for row, text, speed in zip(rows, found, speeds, strict=True):
        row |= {key: text.get(key) for key in _FIGURES}
        row["quantization"] = text["quantization"]
        row["tokens_per_s"] = None if speed is None else statistics.median(speed)
        row["tokens_per_s_rounds"] = speed
    remarks = [] if options.original is None else [DECIDES]
    if len({text["tokens"] for text in found}) > 1:
        remarks.append(OTHER_TOKENS)
    if options.speed:
        remarks.append(
            f"Tokens per second of one request of {options.input_len} tokens that generates {options.output_len}, "
            f"with its prompt, in the dtype of the model; median of {options.rounds}, models in turns."
        )
    return Record("compare", _SEED, asdict(options), {"models": rows, "remarks": remarks}, environment)


def _check_lengths(options: ModelComparisonArguments) -> None:
    """Raise ``bad_option`` if a prompt and its answer are longer than the context of a model."""
    for model in options.models if options.speed else ():
        settings = {"model": model, "dtype": options.dtype, "device": options.device}
        longest = EngineConfig.from_args(settings).max_model_len
        if options.input_len + options.output_len > longest:
            expected = f"at most {longest}, the context of {model}, together with --output-len {options.output_len}"
            hint = f"Give --input-len {max(1, longest - options.output_len)}."
            raise error("bad_option", option="--input-len", value=options.input_len, expected=expected, hint=hint)


def _stored(model: str) -> dict[str, Any]:
    """Return the size of a model on disk: bytes of all tensors, and bits per weight.

    Bits count the scales and zero points of quantized linears, without their biases; of other models, all weights.
    """
    checkpoint = Checkpoint.fetch(model)
    count = weights = 0
    for name in checkpoint.quantized_linears() if checkpoint.spec is not None else ():
        dimensions, _ = checkpoint.dimensions(name)
        weights += dimensions.n * dimensions.k
        headers = checkpoint.linear_headers(name)
        count += sum(info.nbytes for suffix, info in headers.items() if suffix != "bias")
    if not weights:
        count = checkpoint.nbytes
        weights = sum(math.prod(info.shape) for info in checkpoint.inventory.values())
    return {"model": model, "bytes": checkpoint.nbytes, "bits_per_weight": round(8 * count / max(1, weights), 4)}


def _evaluation(options: ModelComparisonArguments, model: str, *versus: str) -> EvalArguments:
    return EvalArguments(
        model=model,
        versus=versus if options.original is not None else (),
        original=options.original,
        text=options.text,
        limit=options.limit,
        dtype=options.dtype,
        device=options.device,
    )


def _quality(
    options: ModelComparisonArguments, progress: OnProgress
) -> tuple[list[dict[str, Any]], Mapping[str, object]]:
    """Return the figures of every model on the first text, with its quantization, and the environment."""
    if options.original is None:
        documents = [evaluate.run(_evaluation(options, model), progress).document() for model in options.models]
        first = [{**document["texts"][0], "quantization": document["config"]["quantization"]} for document in documents]
        return first, documents[0]["environment"]
    document = evaluate.run(_evaluation(options, *options.models), progress).document()
    found = [{**document["texts"][0], "quantization": document["config"]["quantization"]}]
    found += [{**each["texts"][0], "quantization": each["quantization"]} for each in document["versus"]]
    return found, document["environment"]


def _speeds(options: ModelComparisonArguments, progress: OnProgress) -> list[list[float]]:
    """Return the tokens per second of every model in every round; one model is in memory at a time."""
    speeds: list[list[float]] = [[] for _ in options.models]
    for number in range(options.rounds):
        for index, model in enumerate(options.models):
            done = number * len(options.models) + index
            progress("speed", done, options.rounds * len(options.models), model)
            speeds[index].append(_speed(options, model))
            gc.collect()
    return speeds


def _speed(options: ModelComparisonArguments, model: str) -> float:
    rng = random.Random(_SEED)
    engine = MeasuredEngine(
        {
            "model": model,
            "device": options.device,
            "max_model_len": options.input_len + options.output_len,
            "max_num_seqs": 1,
        }
    )
    for _ in range(2):  # the first one warms up
        requests = workload.random_requests(1, options.input_len, options.output_len, engine.vocab_size, rng)
        seconds, _ = engine.generate(requests, ignore_eos=True)
    return options.output_len / seconds


# --- reports ----------------------------------------------------------------------------------------------------------


def cells(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table as text, without a column that is empty in all of them; the headings first."""
    rows = [[text(row) for _, text in COLUMNS] for row in document["models"]]
    kept = [index for index in range(len(COLUMNS)) if any(row[index] != "-" for row in rows)]
    return [[COLUMNS[index][0] for index in kept], *([row[index] for index in kept] for row in rows)]


def write(document: Mapping[str, Any], paths: tuple[Path, ...]) -> None:
    """Write the document to files, in the form that their suffix says. Raises ``output_failed``."""
    for path in paths:
        try:
            path.write_text(_WRITERS[path.suffix](document), encoding="utf-8")
        except OSError as problem:
            raise error("output_failed", path=path, reason=problem.strerror or problem) from None


def markdown(document: Mapping[str, Any]) -> str:
    """Return the table and its remarks as Markdown."""

    def escaped(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

    head, *rows = cells(document)
    lines = [head, ["---", "---", *["--:"] * (len(head) - 2)], *([escaped(cell) for cell in row] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *document["remarks"]]) + "\n"


def page(document: Mapping[str, Any]) -> str:
    """Return the table and its remarks as an HTML page."""
    head, *rows = cells(document)
    against = document["config"]["original"]
    return render(
        "compare.html",
        title="Models compared",
        subtitle=f"{document['date']}, {document['environment'].get('device_name', '')}",
        head=head,
        rows=rows,
        remarks=document["remarks"],
        original=against,
    )


_WRITERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {".md": markdown, ".html": page, ".json": to_json}
