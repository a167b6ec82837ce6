"""From a checkpoint to a quantized checkpoint: load, calibrate, quantize block by block, write, measure, publish.

The source is never modified and never entirely in memory; the output appears atomically at the end (output_folder.py).
Every finished block is written immediately, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aiakq.evaluation.metrics import Comparison, LoadScorer
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.quantizers.chosen_widths import quantize_with_chosen_widths
from aiakq.quantizers.copying import copy_files, copy_tensors
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.parallel import quantize_blocks
from aiakq.quantizers.preparation import prepare
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, Rejected, StageProgress
from aiakq.quantizers.quality import check_text, record_quality
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.quantizers.rotate import rotate
from aiakq.quantizers.run_report import build_report, inherited_entries, write_report
from aiakq.quantizers.tuning.stage import check_tuning, report_tuning, tune_output
from aiakq.spec import QuantSpec


def quantize_checkpoint(
    options: QuantizeOptions, progress: OnProgress | None = None, load_scorer: LoadScorer | None = None
) -> QuantizeReport:
    """Quantize ``options.input`` into the folder ``options.output`` and return the report.

    Whatever can be validated is validated before the calibration starts. After any failure, or Ctrl-C, nothing is left
    behind, unless ``options.resume`` asks to keep what can be resumed. ``load_scorer`` loads a folder for the
    comparison with the source; by default the runtime's own loader.
    """
    options.check_writes_folder()
    on_progress = progress or (lambda _: None)
    began = time.monotonic()
    on_progress(StageProgress("load", 0, 1, options.input))
    prepared = prepare(options)
    check_text(prepared)
    check_tuning(prepared)
    on_progress(StageProgress("load", 1, 1))
    rotate(prepared, on_progress)
    if options.target_bpw is None and options.max_kl is None:
        return _Run(prepared, prepared.spec, on_progress, load_scorer, began).run()

    def attempt(spec: QuantSpec, accept: Callable[[Comparison], bool] | None) -> QuantizeReport:
        return _Run(prepared, spec, on_progress, load_scorer, began, accept).run()

    return quantize_with_chosen_widths(prepared, attempt, on_progress)


def quantize_prepared(prepared: Prepared, spec: QuantSpec, progress: OnProgress) -> QuantizeReport:
    """Quantize a prepared source to ``spec``, instead of that of its options."""
    check_tuning(prepared)
    rotate(prepared, progress)
    return _Run(prepared, spec, progress, None, time.monotonic()).run()


class _Run:
    """One quantization to one spec. Its steps are methods, in execution order."""

    def __init__(
        self,
        prepared: Prepared,
        spec: QuantSpec,
        progress: OnProgress,
        load_scorer: LoadScorer | None,
        started_at: float,
        accept: Callable[[Comparison], bool] | None = None,
    ) -> None:
        self.prepared = prepared
        self.options = prepared.options
        self.plan = prepared.plan(spec)
        self.progress = progress
        self.load_scorer = load_scorer
        self.started_at = started_at
        self.accept = accept

    def run(self) -> QuantizeReport:
        options, prepared = self.options, self.prepared
        with CheckpointWriter(
            options.output,
            inputs=[prepared.source],
            overwrite=options.overwrite,
            expected_bytes=prepared.expected_bytes(self.plan.spec),
            max_shard_bytes=options.max_shard_bytes,
            fingerprint=prepared.fingerprint(self.plan.spec),
            resume=options.resume,
            beside=prepared.file_beside,
            file_name=prepared.model.renaming.to_file,
        ) as writer:
            resumed, entries = len(writer.steps), inherited_entries(prepared.source)
            loop = quantize_blocks(prepared, self.plan, writer, self.progress)
            if len(writer.steps) == len(loop.steps):  # else the interrupted run had already copied them
                copy_tensors(writer, prepared, self.plan.spec, loop.steps)
            tuned = tune_output(prepared, self.plan, writer, self.progress)
            copy_files(writer, prepared, self.plan.spec)
            warnings = [*prepared.warnings, *loop.warnings]
            report = build_report(prepared, self.plan.spec, writer, loop.steps, warnings, resumed)
            report_tuning(report, tuned)
            if options.evaluate:
                self._evaluate(writer, report)
            report.record_cost(self.started_at)
            write_report(writer, report, prepared, entries)
            self.progress(StageProgress("publish", 0, 1, options.output))
            prepared.check_unchanged()
            writer.publish()
        self.progress(StageProgress("publish", 1, 1, options.output))
        return report

    def _evaluate(self, writer: CheckpointWriter, report: QuantizeReport) -> None:
        """Add the comparison with the source to the report. Raises ``Rejected``."""
        quality = record_quality(
            report, writer, self.prepared, self.load_scorer, self.progress, required=self.accept is not None
        )
        if quality is not None and self.accept is not None and not self.accept(quality):
            raise Rejected(quality)
