"""Measures the quantized model against its source before the output is published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiakq.data.documents import sources
from aiakq.data.evaluation_texts import is_bundled
from aiakq.errors import AiakqError
from aiakq.evaluation.metrics import Comparison, LoadScorer
from aiakq.evaluation.quality_check import QualityCheck, fits_whole
from aiakq.evaluation.text import WINDOW, load_texts, read_text
from aiakq.evaluation.text_quality import comparison_document
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.blockwise import BlockwiseCheckpoint
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.records import finite


def quality_check(prepared: Prepared, load_scorer: LoadScorer | None) -> QualityCheck:
    """Create the comparison with the source, by the runtime or, if memory is short, block by block."""
    options = prepared.options

    def open_blockwise(folder: Path, scratch: Path) -> BlockwiseCheckpoint:
        states = HiddenStates((), prepared.activation_budget / 2, scratch)
        adapter = options.lora if folder == prepared.source else None
        return BlockwiseCheckpoint(folder, prepared.device, options.trust_remote_code, states, adapter)

    return QualityCheck(
        prepared.source,
        eval_sources(options.eval_text),
        prepared.tokenizer,
        prepared.model.config.vocab_size,
        prepared.max_positions,
        prepared.device,
        open_blockwise,
        load_scorer,
        blockwise=options.lora is not None,
    )


def eval_sources(given: str | Path | None) -> list[str]:
    """Return the texts that ``--eval-text`` names, several divided by commas; the bundled prose for None."""
    return [source for source in sources("prose" if given is None else given) if source is not None]


def check_text(prepared: Prepared) -> None:
    """Raise ``evaluation_text`` if the evaluation text cannot be read, before the work begins."""
    options = prepared.options
    if not options.evaluate or options.eval_text is None or prepared.tokenizer is None:
        return
    for source in eval_sources(options.eval_text):
        if not is_bundled(source):
            read_text(source, prepared.tokenizer)


def record_quality(
    report: QuantizeReport,
    writer: CheckpointWriter,
    prepared: Prepared,
    load_scorer: LoadScorer | None,
    progress: OnProgress,
    *,
    required: bool,
) -> Comparison | None:
    """Compare the unpublished output of ``writer`` with its source, and add the figures to ``report``.

    A failure is raised if the comparison is ``required``. Otherwise it becomes a warning in the report, and the result
    is None.
    """
    return measure_quality(report, writer.seal(), writer.scratch, prepared, progress, load_scorer, required=required)


def measure_quality(
    report: QuantizeReport,
    folder: Path,
    scratch: Path,
    prepared: Prepared,
    progress: OnProgress,
    load_scorer: LoadScorer | None = None,
    *,
    required: bool = False,
) -> Comparison | None:
    """Compare the model in ``folder`` with the source; otherwise as ``record_quality``."""
    if not report.predicts_text:
        return None
    check = quality_check(prepared, load_scorer)
    try:
        results = check.run(folder, scratch, lambda *step: progress(StageProgress(*step)))
    except AiakqError as problem:
        if required:
            raise
        # Without the details, which are a table.
        report.warnings.append(f"Perplexity was not measured: {problem.message} {problem.remedy}".rstrip())
        return None
    text, result = results[0]
    report.perplexity_before, report.perplexity_after = result.perplexity_original, result.perplexity
    report.kl, report.top1_agreement = result.kl, result.top1_agreement
    report.evaluation_text, report.evaluation_tokens = text.title, result.tokens
    report.evaluations = [finite(comparison_document(text, each, prepared.tokenizer)) for text, each in results]
    report.notes += [each["remark"] for each in report.evaluations if each["remark"]]
    report.notes += limit_note(prepared.options.max_kl, report.evaluations[0])
    return result


def limit_note(limit: float | None, text: Mapping[str, Any]) -> list[str]:
    """Say what ``--max-kl`` limits, and how sure it is that the result is within the limit."""
    if limit is None:
        return []
    bounds = text["kl_interval"]
    interval = "" if bounds is None else f", whose 95 % interval is {bounds['low']:.3g} to {bounds['high']:.3g}"
    return [f"--max-kl {limit:g} limits the mean on {text['name']}, {text['kl']:.3g}{interval}."]


def evaluation_windows(prepared: Prepared) -> tuple[int, int] | None:
    """Return the number and length of the windows of the longest text; None if nothing will be measured."""
    if not prepared.options.evaluate or prepared.tokenizer is None:
        return None
    length = min(WINDOW, prepared.max_positions or WINDOW)
    vocabulary = prepared.model.config.vocab_size
    texts = load_texts(eval_sources(prepared.options.eval_text), prepared.tokenizer, length, vocabulary)
    count, length = max((tuple(text.windows.shape) for text in texts), key=math.prod)
    return count, length


def is_compared_whole(prepared: Prepared) -> bool:
    """Whether both models will be loaded for the comparison."""
    weights = sum(math.prod(info.shape) for info in prepared.checkpoint.inventory.values())
    return prepared.options.lora is None and fits_whole(weights, prepared.device)
