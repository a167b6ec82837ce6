"""Writes a quantized block as one step, verifies it by reading it back, or restores it from an interrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor, nn

from aiakq import formats
from aiakq.errors import error
from aiakq.formats import folded_scales
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.gguf import linears as blocks_of_gguf
from aiakq.formats.steps import CommittedStep
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import QWeight
from aiakq.quantizers.block.decoder_block import DecoderBlock
from aiakq.quantizers.model.plain_linears import stored
from aiakq.quantizers.model.source import cast
from aiakq.quantizers.report.records import LayerResult
from aiakq.spec import QuantSpec


def write_block(writer: CheckpointWriter, block: DecoderBlock, stored_name: Callable[[str], str]) -> CommittedStep:
    """Commit a quantized block with its errors and warnings, and verify that it reads back bit for bit.

    ``stored_name`` is SourceModel's.
    """
    spec, storage = block.plan.spec, block.plan.storage
    linears: dict[str, QWeight] = {f"{block.prefix}.{name}": weight for name, weight in block.result.finished.items()}
    tensors: dict[str, Tensor] = {}
    for name, weight in linears.items():
        rows = block.result.rows.get(name.removeprefix(f"{block.prefix}."))
        tensors |= (
            encode(name, weight, spec, storage) if rows is None else encode_rows(name, rows, weight.bias, storage)
        )
    for name, tensor in block.folder.changed.items():
        full = stored_name(f"{block.prefix}.{name}")
        path, _, last = name.rpartition(".")
        kept = stored(block.module.get_submodule(path), last, tensor.cpu())
        tensors[full] = cast(kept, full, storage).clone()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    for name, tensor in folded_scales.tensors_of(block.folder.columns, block.folder.rows, block.prefix):
        writer.add_beside(name, tensor)
    note = {
        "linears": {name: weight.n * weight.k for name, weight in linears.items()},
        "layers": [asdict(layer) for layer in results_of(block)],
        "experts": [asdict(mixture) for mixture in block.experts],
        "warnings": block.result.warnings,
        "dropped": block.result.dropped,
    }
    step = writer.commit(block.prefix, note)
    written = writer.read(step)
    for name, weight in linears.items():
        verify(name, weight, spec, written)
    return step


def encode(name: str, weight: QWeight, spec: QuantSpec, storage: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of the linear ``name`` in its format, by full name."""
    own = _own(spec, name)
    tensors = formats.load(own.format).write(weight, own, storage)
    return {f"{name}.{suffix}": cast(tensor, f"{name}.{suffix}", None) for suffix, tensor in tensors.items()}


def encode_rows(name: str, rows: Tensor, bias: Tensor | None, storage: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of the linear ``name`` that is stored as rows of blocks [N, bytes of a row]."""
    tensors = blocks_of_gguf.tensors_of(rows, None if bias is None else bias.to(storage))
    return {f"{name}.{suffix}": cast(tensor, f"{name}.{suffix}", None) for suffix, tensor in tensors.items()}


def verify(name: str, weight: QWeight, spec: QuantSpec, written: Mapping[str, Tensor]) -> None:
    """Compare a linear read from ``written`` with the expected one. Raises ``not_as_written``."""
    decoded = decode(name, spec, written, weight.codes.device)
    same = torch.equal(decoded.codes, weight.codes) and torch.equal(dequantize(decoded), dequantize(weight))
    for ours, theirs in ((weight.bias, decoded.bias), (weight.input_scale, decoded.input_scale)):
        same = same and (ours is None) == (theirs is None)
        same = same and (ours is None or theirs is None or torch.equal(ours.float().cpu(), theirs.float().cpu()))
    if not same:
        raise error("not_as_written", layer=name)


def decode(name: str, spec: QuantSpec, written: Mapping[str, Tensor], device: torch.device | None = None) -> QWeight:
    """Return the linear ``name`` decoded from the tensors of its step, on ``device`` if given."""
    own = _own(spec, name)
    module = formats.load(own.format)
    names = {suffix: f"{name}.{suffix}" for suffix in module.SUFFIXES if f"{name}.{suffix}" in written}
    tensors = {suffix: written[full].to(device=device) for suffix, full in names.items()}
    weight = module.read(tensors, own, name)
    assert isinstance(weight, QWeight), "what is written is never decoded to floats"
    return weight.unpacked


def take_over(
    block: DecoderBlock, linears: Iterable[str], written: dict[str, Tensor], stored_name: Callable[[str], str]
) -> None:
    """Restore a block that an earlier run quantized. ``written`` are the tensors of its step, which holds the quantized
    ``linears``, by full name; see write_block."""
    spec = block.plan.spec
    for name in linears:
        inside = name.removeprefix(block.prefix + ".")
        block.result.adopt(inside, decode(name, spec, written))
    take_over_parameters(block.module, block.prefix, linears, written, stored_name)


def take_over_parameters(
    block: nn.Module,
    prefix: str,
    linears: Iterable[str],
    written: Mapping[str, Tensor],
    stored_name: Callable[[str], str],
) -> None:
    """Replace the parameters of a block that its step holds, except those of ``linears``, all by full name."""
    of_linears = tuple(f"{name.removeprefix(prefix + '.')}." for name in linears)
    for name, _ in list(block.named_parameters()):
        full = stored_name(f"{prefix}.{name}")
        if full in written and not name.startswith(of_linears):
            path, _, last = name.rpartition(".")
            module = block.get_submodule(path)
            value = stored(module, last, written[full]).to(getattr(module, last).device, torch.float32)
            module.register_parameter(last, nn.Parameter(value, requires_grad=False))


def results_of(block: DecoderBlock) -> list[LayerResult]:
    """Return the report entries of the linears of a finished block."""
    results = []
    for name, linear in block.linears.items():
        spec = block.spec(name)
        results.append(
            LayerResult(
                name=f"{block.prefix}.{name}",
                error=block.result.errors.get(name),
                n=linear.out_features,
                k=linear.in_features,
                bits=spec.bits,
                group_size=spec.group_size,
                remarks=block.result.remarks.get(name, {}),
                **block.result.magnitudes.of(name),
            )
        )
    return results


def layers_of(step: CommittedStep) -> list[LayerResult]:
    """Return the layer entries of the report that was committed with a block."""
    return [LayerResult(**entry) for entry in step.note["layers"]]


def written_names(step: CommittedStep) -> set[str]:
    """Return the model's tensors that need not be copied, because this step holds them or their quantized form."""
    linears: dict[str, object] = step.note.get("linears", {})
    return {*step.tensors, *(f"{name}.{last}" for name in linears for last in ("weight", "bias"))}


def _own(spec: QuantSpec, name: str) -> QuantSpec:
    own = spec.for_layer(name)
    assert own is not None, name
    return own
