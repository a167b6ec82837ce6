"""From a checkpoint to a quantized checkpoint: load, calibrate, quantize block by block, write, measure, publish.

The source is never modified and never wholly in memory; the output appears in one step at the end (output_folder.py).
Every finished block is on disk at once, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import copy
import datetime
import resource
import time
from collections.abc import Callable

import torch

import aiakq
from aiakq import quantizers
from aiakq.errors import AiakqError
from aiakq.evaluation.metrics import Comparison, LoadScorer
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.steps import CommittedStep
from aiakq.quantizers.block import BlockWork, Original
from aiakq.quantizers.lm_head import head_tensors
from aiakq.quantizers.model.activations import Activations, HiddenStates, batched
from aiakq.quantizers.model.experts import ExpertTokens, expert_warnings
from aiakq.quantizers.model.passes import capture
from aiakq.quantizers.model.smooth_mappings import Wiring
from aiakq.quantizers.model.source import cast
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.planning.widths import quantize_with_chosen_widths
from aiakq.quantizers.preparation import DTYPE_WORDS, Prepared, prepare
from aiakq.quantizers.progress import OnProgress, Progress, Rejected
from aiakq.quantizers.quality import check_text, quality_check
from aiakq.quantizers.report.card import CARD_FILE
from aiakq.quantizers.report.card import text as card_text
from aiakq.quantizers.report.page import html_page
from aiakq.quantizers.report.records import QuantizeReport, command_line
from aiakq.quantizers.writing import layers_of, take_over, write_block, written_names
from aiakq.runtime.device_memory import release_memory
from aiakq.spec import QuantSpec
from aiakq.system.memory import gc_frozen

REPORT_FILE = "aiakq_report.json"
PAGE_FILE = "aiakq_report.html"
#: Tokens in one calibration batch.
_BATCH_TOKENS = 4096


def quantize_checkpoint(
    options: QuantizeOptions, progress: OnProgress | None = None, load_scorer: LoadScorer | None = None
) -> QuantizeReport:
    """Quantize ``options.input`` into the folder ``options.output`` and return the report.

    Everything that can be refused is refused before the calibration starts; after any failure, or Ctrl-C, nothing is
    left behind, unless ``options.resume`` asks to keep what can be resumed. ``load_scorer`` loads a folder for the
    comparison with the source; the runtime's own loader by default.
    """
    tell = progress or (lambda _: None)
    began = time.monotonic()
    tell(Progress("load", 0, 1, options.input))
    prepared = prepare(options)
    check_text(prepared)
    tell(Progress("load", 1, 1))
    if options.target_bpw is None and options.max_kl is None:
        return _Run(prepared, prepared.spec, tell, load_scorer, began).run()

    def attempt(spec: QuantSpec, accept: Callable[[Comparison], bool] | None) -> QuantizeReport:
        return _Run(prepared, spec, tell, load_scorer, began, accept).run()

    return quantize_with_chosen_widths(prepared, attempt, tell)


class _Run:
    """One quantization to one spec. The steps are methods in the order they happen."""

    def __init__(
        self,
        prepared: Prepared,
        spec: QuantSpec,
        progress: OnProgress,
        load_scorer: LoadScorer | None,
        began: float,
        accept: Callable[[Comparison], bool] | None = None,
    ) -> None:
        self.prepared = prepared
        self.options = prepared.options
        self.plan = prepared.plan(spec)
        self.model = prepared.model
        self.progress = progress
        self.load_scorer = load_scorer
        self.began = began
        self.accept = accept
        self.warnings = list(prepared.warnings)

    def run(self) -> QuantizeReport:
        options, prepared = self.options, self.prepared
        with CheckpointWriter(
            options.output,
            inputs=[prepared.source],
            overwrite=options.overwrite,
            expected_bytes=prepared.expected_bytes(self.plan.spec),
            fingerprint=prepared.fingerprint(self.plan.spec),
            resume=options.resume,
        ) as writer:
            self.resumed = len(writer.steps)
            with gc_frozen():
                self._quantize_blocks(writer)
            self._copy_the_rest(writer)
            report = self._report(writer)
            if options.evaluate:
                self._evaluate(writer, report)
            report.seconds = round(time.monotonic() - self.began, 2)
            report.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            writer.add_json(REPORT_FILE, report.document())
            writer.add_text(PAGE_FILE, html_page(report))
            writer.add_text(CARD_FILE, card_text(report, options, prepared.source))
            self.progress(Progress("publish", 0, 1, options.output))
            writer.publish()
        self.progress(Progress("publish", 1, 1, options.output))
        return report

    # --- the blocks -----------------------------------------------------------------------------------------------

    def _quantize_blocks(self, writer: CheckpointWriter) -> None:
        count = len(self.model.blocks)
        self.blocks: list[CommittedStep] = writer.steps[:count]
        if self.resumed > count:  # only the measuring was left
            return
        method = quantizers.load(self.options.method)
        inputs = self._capture(writer)
        beside = inputs.copy() if self.plan.needs_original else None
        folds = self.options.method in ("awq", "smooth_quant") or self.options.awq_scaling
        wiring = Wiring(self.model.config, self.plan.heads, folds)
        for index, block in enumerate(self.model.blocks):
            prefix = self.model.block_prefix(index)
            self.progress(Progress("quantize", index, count, prefix))
            self.model.load(block, prefix)
            groups, pairs = wiring.of(block, index, inputs)
            original = None if beside is None else Original(copy.deepcopy(block), beside)
            work = BlockWork(block, index, prefix, self.plan, groups, inputs, [], original, pairs)
            with torch.no_grad():
                if index < self.resumed:
                    step = self.blocks[index]
                    take_over(work, step, writer.read(step))
                    if index < count - 1:
                        inputs.advance(block, index)
                else:
                    method.quantize_block(work)
                    work.advance(last=index == count - 1)
                    self.blocks.append(write_block(writer, work))
                if original is not None and index < count - 1:
                    original.inputs.advance(original.block, index)
            self.model.drop(block)
            self.prepared.checkpoint.close()
            del work, original
            release_memory()  # blocks must not pile up
        self.warnings += wiring.warnings()
        self.progress(Progress("quantize", count, count))

    def _capture(self, writer: CheckpointWriter) -> Activations:
        samples = self.prepared.samples
        states = HiddenStates((), self.prepared.activation_budget, writer.scratch)
        if samples is None:
            return Activations(states, {}, self.prepared.device)
        longest = max(len(sample) for sample in samples.samples)
        batches = batched(samples.samples, max(1, _BATCH_TOKENS // longest))
        total = len(batches)

        def tell(done: int) -> None:
            self.progress(Progress("calibrate", done, total))

        return capture(self.model, batches, tell, states)

    # --- the rest of the folder -----------------------------------------------------------------------------------

    def _copy_the_rest(self, writer: CheckpointWriter) -> None:
        """Every tensor that was not quantized or folded, in the output's dtype; config and tokenizer files."""
        prepared, spec = self.prepared, self.plan.spec
        if len(writer.steps) == len(self.blocks):
            done = {name for step in self.blocks for name in written_names(step)}
            head = head_tensors(prepared, spec)
            for name, tensor in head.items():
                writer.add(name, tensor)
            done |= prepared.not_copied()
            for name, tensor in self.model.rest(done):
                writer.add(name, cast(tensor, name, prepared.storage))
            writer.commit("rest", {"head": prepared.head_weights if head else 0})
        for name, document in prepared.documents(spec).items():
            writer.add_json(name, document)
        for path in prepared.verbatim_files():
            writer.copy_file(path)

    def _report(self, writer: CheckpointWriter) -> QuantizeReport:
        prepared, spec = self.prepared, self.plan.spec
        warnings = [*self.warnings, *(line for step in self.blocks for line in step.note["warnings"])]
        experts = [ExpertTokens(**entry) for step in self.blocks for entry in step.note["experts"]]
        if self.options.method != "weight_only_int8":
            warnings += expert_warnings(experts)
        dropped = max((step.note["dropped"] for step in self.blocks), default=0)
        if dropped:
            warnings.append(f"{dropped} calibration tokens were left out: their activations were not finite.")
        size, weights = quantized_size(writer.steps, prepared.head)
        samples = prepared.samples
        return QuantizeReport(
            input=self.options.input,
            output=str(writer.output),
            method=self.options.method,
            scheme=spec.describe(),
            format=spec.format,
            group_size=spec.group_size,
            symmetric=spec.symmetric,
            dtype=DTYPE_WORDS[prepared.storage],
            tp=self.options.tp,
            bits_per_weight=round(size * 8 / weights, 4),
            bytes_before=sum(info.nbytes for info in prepared.checkpoint.inventory.values()),
            bytes_after=writer.total_bytes,
            layers=[layer for step in self.blocks for layer in layers_of(step)],
            experts=experts,
            calibration=None if samples is None else samples.source,
            calibration_sha256=None if samples is None else samples.digest,
            calibration_lengths=None if samples is None else samples.lengths,
            samples=0 if samples is None else len(samples.samples),
            tokens=0 if samples is None else samples.tokens,
            dropped_tokens=dropped,
            smooth_alpha=self.plan.alpha if self.options.method == "smooth_quant" else None,
            seed=self.options.seed,
            version=aiakq.__version__,
            verified=sum(len(step.note["linears"]) for step in self.blocks),
            resumed_from=self.resumed,
            created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            command=command_line(self.options),
            padded=dict(prepared.cut.widths),
            notes=list(prepared.cut.notes),
            warnings=warnings,
        )

    def _evaluate(self, writer: CheckpointWriter, report: QuantizeReport) -> None:
        """The output against the source before it is published. A failure costs the figures only."""
        check = quality_check(self.prepared, self.load_scorer)
        folder = writer.seal()
        try:
            found, name = check.run(folder, writer.scratch, lambda *step: self.progress(Progress(*step)))
        except AiakqError as problem:
            if self.accept is not None:
                raise
            # Without its details, which are a table.
            report.warnings.append(f"Perplexity was not measured: {problem.message} {problem.remedy}".rstrip())
            return
        report.perplexity_before, report.perplexity_after = found.perplexity_original, found.perplexity
        report.kl, report.top1_agreement = found.kl, found.top1_agreement
        report.evaluation_text, report.evaluation_tokens = name, found.tokens
        if self.accept is not None and not self.accept(found):
            raise Rejected(found)


def quantized_size(steps: list[CommittedStep], head: str | None) -> tuple[int, int]:
    """Bytes of the quantized linears' tensors without biases, and how many weights they stand for."""
    size = weights = 0
    for step in steps:
        linears = dict(step.note.get("linears", {}))
        if head is not None and step.note.get("head"):
            linears[head] = step.note["head"]
        weights += sum(linears.values())
        for name, bytes_ in zip(step.tensors, step.sizes, strict=True):
            prefix, _, suffix = name.rpartition(".")
            size += bytes_ if prefix in linears and suffix != "bias" else 0
    return size, weights
