"""Expresses the numbers of a weight in the terms of another format, without changing any of them.

Codes are widened by a constant, groups are split and their scales repeated, or merged if their scales are equal,
offsets that are whole numbers of steps become zero points, and negative scales change places with mirrored codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec


class Inexact(Exception):
    """Raised with the reason why a weight cannot be expressed without changing its numbers."""


@dataclass(frozen=True)
class Abilities:
    """What the files of a format can hold besides what a LayerSpec says.

    signed_scales  negative scales.
    input_order    an order of the inputs (act-order).
    scales         dtype of scales; None: any float.
    """

    signed_scales: bool = True
    input_order: bool = False
    scales: torch.dtype | None = None


def expressed(weight: QWeight, layer: LayerSpec, abilities: Abilities) -> QWeight:
    """Return ``weight`` stored as ``layer`` says, with the same numbers. Raises ``Inexact`` with the first obstacle.

    weight [N, K] with groups [N, ceil(K / G)]; not modified.
    """
    if weight.rotated:
        raise Inexact("its inputs are rotated while the model runs")
    if weight.factors is not None:
        raise Inexact("its inputs are multiplied by factors while the model runs")
    if weight.perm is not None and not abilities.input_order:
        raise Inexact("its inputs have an order of their own (act-order)")
    if (weight.code_type is not None) != (layer.float8 is not None):
        is_float = weight.code_type is not None
        raise Inexact("its codes are 8-bit floats" if is_float else "its codes are not 8-bit floats")
    if (weight.table is not None) != (layer.table is not None):
        raise Inexact("its codes are indices of a table of values" if weight.table is not None else "it has no table")
    has_activations = not weight.scheme.endswith("a16")
    if has_activations != bool(layer.activation_bits):
        raise Inexact("its activations are rounded" if has_activations else "its activations are not rounded")
    if weight.code_type is None and weight.table is None:
        weight = _widened(_with_zeros(weight), layer)
    weight = _regrouped(weight, layer.group_size)
    if not abilities.signed_scales:
        weight = _with_positive_scales(weight, layer.symmetric)
    if layer.symmetric and weight.zeros is not None:
        raise Inexact("it has zero points")
    if not layer.symmetric and weight.zeros is None:
        half = 1 << (weight.bits - 1)
        weight = replace(weight, zeros=torch.full(weight.scales.shape, half, dtype=torch.uint8))
    if abilities.scales is not None:
        weight = replace(weight, scales=_cast_scales(weight.scales, abilities.scales))
    return weight


def _with_zeros(weight: QWeight) -> QWeight:
    """Return the weight with whole zero points in place of offsets and of zero points that are floats."""
    zeros, what = weight.zeros, "zero points are not codes"
    if weight.offsets is not None:
        scales = weight.scales.to(torch.float32)
        zeros = -weight.offsets.to(torch.float32) / torch.where(scales == 0, torch.ones_like(scales), scales)
        what = "offsets are not whole numbers of steps"
    if zeros is None or zeros.dtype == torch.uint8:
        return weight
    whole = zeros.to(torch.float32).round()
    if not torch.equal(whole, zeros.to(torch.float32)) or bool(((whole < 0) | (whole >= 1 << weight.bits)).any()):
        raise Inexact(f"its {what}")
    return replace(weight, zeros=whole.to(torch.uint8), offsets=None)


def _widened(weight: QWeight, layer: LayerSpec) -> QWeight:
    """Return the weight with codes of ``layer.bits``: those of fewer bits are moved to the middle."""
    if layer.bits < weight.bits:
        raise Inexact(f"its codes have {weight.bits} bits, not {layer.bits}")
    scheme = f"w{layer.bits}a8" if layer.activation_bits else f"w{layer.bits}a16"
    shift = (1 << (layer.bits - 1)) - (1 << (weight.bits - 1))
    zeros = None if weight.zeros is None else weight.zeros + shift
    return replace(weight, scheme=scheme, codes=weight.codes + shift if shift else weight.codes, zeros=zeros)


def _regrouped(weight: QWeight, group_size: int) -> QWeight:
    """Return the weight with groups of ``group_size`` inputs, -1 for all, with repeated scales."""
    size = weight.k if group_size == -1 or group_size >= weight.k else group_size
    if size == weight.group_size:
        return weight
    groups = -(-weight.k // size)
    if size > weight.group_size:
        return _merged(weight, size, groups)
    times = groups if weight.scales.shape[1] == 1 else weight.group_size // size
    if weight.scales.shape[1] > 1 and weight.group_size % size:
        raise Inexact(f"its scales are shared by {weight.group_size} inputs, not {size}")

    def repeated(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(times, dim=1)[:, :groups].contiguous()

    scales = repeated(weight.scales)
    assert scales is not None
    return replace(
        weight, scales=scales, zeros=repeated(weight.zeros), offsets=repeated(weight.offsets), group_size=size
    )


def _merged(weight: QWeight, size: int, groups: int) -> QWeight:
    """Return the weight with larger groups, in each of which all the present ones have the same scales."""
    reason = f"its scales are shared by {weight.group_size} inputs, not {size}"
    if size % weight.group_size and size != weight.k:
        raise Inexact(reason)
    times = -(-size // weight.group_size)

    def merged(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        first = values[:, ::times].contiguous()
        if not torch.equal(first.repeat_interleave(times, dim=1)[:, : values.shape[1]], values):
            raise Inexact(reason)
        return first

    scales = merged(weight.scales)
    assert scales is not None and scales.shape[1] == groups
    return replace(weight, scales=scales, zeros=merged(weight.zeros), offsets=merged(weight.offsets), group_size=size)


def _with_positive_scales(weight: QWeight, symmetric: bool) -> QWeight:
    """Return the weight without negative scales: ``(q - z) s`` is ``(z' - q') s`` with mirrored codes and zero points.

    The zero point of symmetric codes would move, so that they would have to be asymmetric.
    """
    negative = weight.scales < 0
    if not bool(negative.any()):
        return weight
    if symmetric or weight.code_type is not None or weight.table is not None:
        raise Inexact("it has negative scales")
    top = (1 << weight.bits) - 1
    half = torch.full_like(weight.scales, 1 << (weight.bits - 1), dtype=torch.uint8)
    zeros = half if weight.zeros is None else weight.zeros
    wide = negative.repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
    return replace(
        weight,
        codes=torch.where(wide, top - weight.codes, weight.codes),
        scales=weight.scales.abs(),
        zeros=torch.where(negative, top - zeros, zeros),
    )


def _cast_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    cast = scales.to(dtype)
    if not torch.equal(cast.to(torch.float32), scales.to(torch.float32)):
        have, need = (str(each).removeprefix("torch.") for each in (scales.dtype, dtype))
        raise Inexact(f"its scales are {have}, and not all of them are {need} numbers")
    return cast
