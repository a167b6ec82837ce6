"""Builds the report of a run and writes it next to the weights."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping

import aiakq
from aiakq.errors import one_line
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.compressed_tensors_floats import preset
from aiakq.formats.steps import CommittedStep
from aiakq.quantizers.model.composite import pipeline_tag, predicts_text
from aiakq.quantizers.model.experts import ExpertTokens, expert_warnings
from aiakq.quantizers.prepared import DTYPE_WORDS, Prepared
from aiakq.quantizers.readers import gaps
from aiakq.quantizers.recipe_file import recipe_document
from aiakq.quantizers.report import card
from aiakq.quantizers.report.page import html_page
from aiakq.quantizers.report.records import QuantizeReport, command_line
from aiakq.quantizers.writing import layers_of
from aiakq.spec import QuantSpec

REPORT_FILE = "aiakq_report.json"
PAGE_FILE = "aiakq_report.html"


def build_report(
    prepared: Prepared,
    spec: QuantSpec,
    writer: CheckpointWriter,
    steps: list[CommittedStep],
    warnings: list[str],
    resumed: int,
) -> QuantizeReport:
    """Build the report before evaluation. ``steps`` are the blocks' steps, ``resumed`` of them by an earlier run."""
    experts = [ExpertTokens(**entry) for step in steps for entry in step.note["experts"]]
    dropped = max((step.note["dropped"] for step in steps), default=0)
    size, weights = quantized_size(writer.steps, prepared.head)
    samples, unread = prepared.samples, gaps(prepared.model, spec)
    return QuantizeReport(
        input=prepared.options.input,
        output=str(writer.output),
        method=prepared.options.method,
        scheme=spec.describe(),
        format=spec.format,
        group_size=spec.group_size,
        symmetric=spec.symmetric,
        dtype=DTYPE_WORDS[prepared.storage],
        tp=prepared.options.tp,
        bits_per_weight=round(size * 8 / weights, 4),
        bytes_before=prepared.checkpoint.nbytes,
        bytes_after=writer.total_bytes,
        layers=[layer for step in steps for layer in layers_of(step)],
        experts=experts,
        calibration=None if samples is None else samples.source,
        calibration_sha256=None if samples is None else samples.digest,
        calibration_lengths=None if samples is None else samples.lengths,
        samples=0 if samples is None else len(samples.samples),
        images=0 if samples is None or samples.images is None else samples.images.num_images,
        tokens=0 if samples is None else samples.tokens,
        dropped_tokens=dropped,
        smooth_alpha=_smooth_alpha(prepared),
        seed=prepared.options.seed,
        version=aiakq.__version__,
        verified=sum(len(step.note["linears"]) for step in steps),
        resumed_from=resumed,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command_line(prepared.options),
        recipe=recipe_document(prepared.options, prepared.recipe, prepared.spec.activation_bits),
        not_in_transformers=unread.transformers,
        not_in_vllm=unread.vllm,
        padded=dict(prepared.cut.widths),
        predicts_text=predicts_text(prepared.checkpoint.config),
        lora=None if prepared.model.adapter is None else prepared.model.adapter.name,
        notes=[
            *_float_notes(spec),
            *prepared.remarks,
            *_decoder_note(prepared),
            *_adapter_note(prepared),
            *_rotation_notes(prepared),
            *prepared.cut.notes,
        ],
        warnings=[*warnings, *_step_warnings(prepared, steps, experts, dropped)],
    )


def _step_warnings(
    prepared: Prepared, steps: list[CommittedStep], experts: list[ExpertTokens], dropped: int
) -> list[str]:
    """Return what the steps warn of."""
    warnings = [line for step in steps for line in step.note["warnings"]]
    if prepared.recipe.needs_inputs:
        warnings += expert_warnings(experts)
    if dropped:
        warnings.append(f"{dropped} calibration tokens were left out: their activations were not finite.")
    return warnings


def _float_notes(spec: QuantSpec) -> list[str]:
    """Say what is done to the activations of a model of floats, and what llm-compressor calls it."""
    layer = spec.layer
    if not layer.is_float:
        return []
    scales = "one scale per token"
    if layer.table is not None:
        scales = f"scales for every {layer.group_size} of them"
        scales += ", in units of a stored number per layer" if layer.static_input else ""
    elif layer.static_input:
        scales = "a stored scale per layer"
    elif layer.float8 is not None and layer.float8.activation_group > 0:
        scales = f"a scale for every {layer.float8.activation_group} of them"
    kind = "e2m1" if layer.activation_bits == 4 else "e4m3"
    inputs = f"are rounded to {kind} with {scales}" if layer.activation_bits else "are not rounded"
    name = preset(layer)
    called = "" if name is None else f" llm-compressor calls this {name}."
    return [f"Activations {inputs}.{called}"]


def _decoder_note(prepared: Prepared) -> list[str]:
    decoder = prepared.model.decoder
    if not decoder:
        return []
    return [
        f"Of this multimodal model the decoder ({decoder}) was quantized, calibrated on text; all other tensors are "
        "those of the original. Figures are of text, which is what aiakq runs it on."
    ]


def _adapter_note(prepared: Prepared) -> list[str]:
    adapter = prepared.model.adapter
    if adapter is None:
        return []
    return [
        f"The LoRA adapter {adapter.name} (digest {adapter.digest}) was merged into the weights before they were "
        "quantized; the figures of the original are those of the merged model."
    ]


def _rotation_notes(prepared: Prepared) -> list[str]:
    rotation = prepared.model.rotation
    if rotation is None:
        return []
    known = rotation.structure
    what = f"The residual stream ({len(known.readers)} layers that read it, {len(known.writers)} that write it)"
    count = len(rotation.heads)
    if count:
        what += f" and the values of {count} attention layer{'' if count == 1 else 's'} were rotated"
    else:
        what += " was rotated"
    notes = [f"{what} ({rotation.kind}); in float32 the rotated model has the logits of the original."]
    if prepared.model.untied_head:
        size = prepared.untied_weights * prepared.storage.itemsize / 1e6
        notes.append(
            f"The output layer {prepared.model.untied_head} is no longer tied to the embedding, because the gain of "
            f"the norm before it was folded into it: {size:.3g} MB more."
        )
    return notes


inherited_entries = card.inherited_entries


def write_report(
    writer: CheckpointWriter, report: QuantizeReport, prepared: Prepared, inherited: Mapping[str, object]
) -> None:
    """Add the report as JSON and as a page, and the model card with the entries ``inherited``, to the output.

    A page or a card that cannot be made becomes a warning: the weights are done, and are published without it.
    """
    pages: dict[str, Callable[[], str]] = {
        PAGE_FILE: lambda: html_page(report),
        card.CARD_FILE: lambda: card.text(
            report, prepared.options, prepared.source, inherited, pipeline_tag(prepared.checkpoint.config)
        ),
    }
    for name, make in pages.items():
        try:
            text = make()
        except Exception as problem:
            # Whatever it is, hours of work do not depend on it.
            report.warnings.append(f"{name} was not written: {one_line(problem)}.")
            continue
        writer.add_text(name, text)
    writer.add_json(REPORT_FILE, report.document())


def _smooth_alpha(prepared: Prepared) -> float | None:
    """Return the smoothing strength, if there is one for the whole model."""
    smooth = prepared.recipe.transform("smooth_quant")
    alpha = smooth.document()["alpha"] if smooth is not None else None
    return alpha if isinstance(alpha, float) else None


def quantized_size(steps: list[CommittedStep], head: str | None) -> tuple[int, int]:
    """Return the bytes of the quantized linears' tensors without biases, and the number of their weights."""
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
