"""Measures the quantized model against its source before the output is published."""

from __future__ import annotations

from pathlib import Path

from aiakq.data.tokens import read_documents
from aiakq.errors import AiakqError, error
from aiakq.evaluation.metrics import Comparison, LoadScorer
from aiakq.evaluation.quality_check import QualityCheck
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.blockwise import BlockwiseCheckpoint
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.report.records import QuantizeReport


def quality_check(prepared: Prepared, load_scorer: LoadScorer | None) -> QualityCheck:
    """Create the comparison with the source, by the runtime or, if memory is short, block by block."""
    options = prepared.options

    def open_blockwise(folder: Path, scratch: Path) -> BlockwiseCheckpoint:
        states = HiddenStates((), prepared.activation_budget / 2, scratch)
        adapter = options.lora if folder == prepared.source else None
        return BlockwiseCheckpoint(folder, prepared.device, options.trust_remote_code, states, adapter)

    return QualityCheck(
        prepared.source,
        None if options.eval_text is None else Path(options.eval_text),
        prepared.tokenizer,
        prepared.model.config.vocab_size,
        prepared.max_positions,
        prepared.device,
        open_blockwise,
        load_scorer,
        blockwise=options.lora is not None,
    )


def check_text(prepared: Prepared) -> None:
    """Raise ``evaluation_text`` if the evaluation text cannot be read, before the work begins."""
    options = prepared.options
    if not options.evaluate or options.eval_text is None or prepared.tokenizer is None:
        return
    try:
        read_documents(Path(options.eval_text), prepared.tokenizer)
    except AiakqError as failure:
        reason = failure.fields.get("reason", failure.message)
        raise error("evaluation_text", reason=f"{options.eval_text}: {reason}") from None


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
    check = quality_check(prepared, load_scorer)
    folder = writer.seal()
    try:
        result, name = check.run(folder, writer.scratch, lambda *step: progress(StageProgress(*step)))
    except AiakqError as problem:
        if required:
            raise
        # Without the details, which are a table.
        report.warnings.append(f"Perplexity was not measured: {problem.message} {problem.remedy}".rstrip())
        return None
    report.perplexity_before, report.perplexity_after = result.perplexity_original, result.perplexity
    report.kl, report.top1_agreement = result.kl, result.top1_agreement
    report.evaluation_text, report.evaluation_tokens = name, result.tokens
    return result
