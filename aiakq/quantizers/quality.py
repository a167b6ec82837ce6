"""Measuring the output of ``quantize`` against its source before it is published."""

from __future__ import annotations

from pathlib import Path

from aiakq.data.tokens import read_documents
from aiakq.errors import AiakqError, error
from aiakq.evaluation.metrics import LoadScorer
from aiakq.evaluation.quality_check import QualityCheck
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.blockwise import BlockwiseCheckpoint
from aiakq.quantizers.prepared import Prepared


def quality_check(prepared: Prepared, load_scorer: LoadScorer | None) -> QualityCheck:
    """The comparison with the source, by the runtime or, where memory is short, block by block."""
    options = prepared.options

    def open_blockwise(folder: Path, scratch: Path) -> BlockwiseCheckpoint:
        states = HiddenStates((), prepared.activation_budget / 2, scratch)
        return BlockwiseCheckpoint(folder, prepared.device, options.trust_remote_code, states)

    return QualityCheck(
        prepared.source,
        None if options.eval_text is None else Path(options.eval_text),
        prepared.tokenizer,
        prepared.max_positions,
        prepared.device,
        open_blockwise,
        load_scorer,
    )


def check_text(prepared: Prepared) -> None:
    """Refuse an evaluation text that cannot be read, before the work begins. Raises ``evaluation_text``."""
    options = prepared.options
    if not options.evaluate or options.eval_text is None or prepared.tokenizer is None:
        return
    try:
        read_documents(Path(options.eval_text), prepared.tokenizer)
    except AiakqError as failure:
        reason = failure.fields.get("reason", failure.message)
        raise error("evaluation_text", reason=f"{options.eval_text}: {reason}") from None
