"""Rounds a weight again that another format cannot hold, and measures what any conversion changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aiakq.convert.exact import Abilities, Inexact, expressed
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.formats.dequantized import some_rows
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.rounding.ranges import round_near, round_searched
from aiakq.spec import LayerSpec


def rounded(weight: QWeight, layer: LayerSpec, abilities: Abilities) -> tuple[QWeight, str]:
    """Return a weight that is stored as ``layer`` says, near to ``weight``, and what was done to it.

    What can be kept is kept: codes if only the activations are no longer rounded, or only the scales are. Otherwise
    weights are rounded to the nearest code of a range that is searched for each group.
    """
    changes = []
    if not weight.scheme.endswith("a16") and not layer.activation_bits:
        changes.append("activations are no longer rounded")
        kind = "lut4" if weight.table is not None else "fp8" if weight.code_type is not None else f"w{weight.bits}"
        weight = replace(weight, scheme=f"{kind}a16", input_scale=None, rounding=InputRounding())
        try:
            return expressed(weight, layer, abilities), changes[0]
        except Inexact:
            pass
    try:
        kept = expressed(weight, layer, replace(abilities, scales=None))
        if abilities.scales is not None and bool(torch.isfinite(kept.scales.to(abilities.scales)).all()):
            scales = kept.scales.to(abilities.scales)
            if not bool(((scales == 0) & (kept.scales != 0)).any()):
                return replace(kept, scales=scales), "; ".join([*changes, "scales were rounded"])
    except Inexact:
        pass
    return _again(weight, layer, abilities), "; ".join([*changes, "weights were rounded again"])


def _again(weight: QWeight, layer: LayerSpec, abilities: Abilities) -> QWeight:
    dense = dequantize(weight)
    size = weight.k if layer.group_size == -1 or layer.group_size > weight.k else layer.group_size
    padding = -weight.k % size
    if padding:
        dense = torch.nn.functional.pad(dense, (0, padding))
    scheme = layer.bits, size, layer.symmetric, abilities.scales or torch.float32
    if layer.bits == 8:
        codes, scales, zeros = round_near(dense, *scheme)
    else:
        codes, scales, zeros = round_searched(dense, *scheme, signed=abilities.signed_scales)
    return QWeight(
        scheme=f"w{layer.bits}a16",
        codes=codes[:, : weight.k].contiguous(),
        scales=scales if abilities.scales is None else scales.to(abilities.scales),
        zeros=None if layer.symmetric else zeros.to(torch.uint8),
        bias=weight.bias,
        group_size=size,
    )


@dataclass(frozen=True)
class Error:
    """What a conversion changed in the weights of a layer.

    relative  Frobenius norm of the difference, beside that of the weight.
    largest   largest difference of a weight.
    """

    relative: float = 0.0
    largest: float = 0.0

    @property
    def is_zero(self) -> bool:
        return self.largest == 0.0


def error_of(written: QWeight | Tensor, weight: QWeight | DecodedWeight) -> Error:
    """Return how far a written weight, quantized or a tensor [N, K] of floats, is from ``weight``, in float32."""
    difference = norm = largest = 0.0
    for rows in some_rows(weight):
        wanted = as_floats(weight.with_rows(rows))
        if isinstance(written, QWeight):
            found = dequantize(written.with_rows(rows))
        else:
            found = written[rows].to(torch.float32)
        if torch.equal(found, wanted):
            norm += float(wanted.double().square().sum())
            continue
        gap = (found - wanted).double()
        difference += float(gap.square().sum())
        norm += float(wanted.double().square().sum())
        largest = max(largest, float(gap.abs().max()))
    return Error((difference / norm) ** 0.5 if norm else 0.0, largest)
