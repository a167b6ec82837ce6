"""The tensors of linears whose weights are integers, as compressed-tensors stores them, described in
compressed_tensors.py: packed into words, or one in each byte.

Activations are rounded by the kernels of w8a8 if they are symmetric, and so are weights, with one scale per output.
Everything else is rounded as compressed-tensors' own forward does (quantization/lifecycle/forward.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.bit_stream import unpack_stream
from aiakq.formats.checks import (
    derive_group_size,
    finite,
    mismatch,
    need,
    order_from_groups,
    positive_number,
    read_bias,
    shaped,
    with_live_scales,
)
from aiakq.formats.input_rounding import rounding_of
from aiakq.kernels.packing import SUPPORTED_BITS, unpack, words_for
from aiakq.kernels.types import SCHEME_BITS, InputRounding, QWeight
from aiakq.kernels.word_weight import WORD_BITS, WordWeight
from aiakq.spec import QuantSpec

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def gapped_words(count: int, bits: int) -> int:
    """Return the words for ``count`` codes if none straddles two words, as old versions packed 3, 5, 6 and 7 bits."""
    return -(-count // (32 // bits))


def read_packed(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    if spec.table is not None:
        raise error("format_unsupported", reason=f"{name} has integers as weights, and the config says floats")
    packed = need(tensors, "weight_packed", name, 2, torch.int32)
    shape = need(tensors, "weight_shape", name, 1, torch.int64, torch.int32).tolist()
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in _FLOATS:
        raise mismatch(name, "weight_scale is missing or not a float")
    bits = width(packed.shape[1], shape[1], spec.bits) if len(shape) == 2 and shape[0] == packed.shape[0] else None
    if bits is None:
        raise mismatch(name, f"weight_shape is {shape}, weight_packed {list(packed.shape)} at {spec.bits} bits")
    n, k = shape
    scales = _rows(scales, n, name)
    groups = scales.shape[1]
    group_size = derive_group_size(k, groups, spec.group_size, "weight_scale", name)
    perm = None
    if "weight_g_idx" in tensors:
        perm = order_from_groups(tensors["weight_g_idx"], k, groups, group_size, "weight_g_idx", name)
    zeros = None
    if "weight_zero_point" in tensors:
        point = tensors["weight_zero_point"]
        if point.dtype == torch.int8 and point.shape == (n,):
            tensors = {**tensors, "weight_zero_point": point.unsqueeze(1)}
        zeros = _read_zeros(need(tensors, "weight_zero_point", name, 2, torch.int32, torch.int8), n, groups, bits, name)
    elif not spec.symmetric:
        raise mismatch(name, "weight_zero_point is missing")
    if bits == 7 and zeros is None:  # codes of 7 bits are held in 8
        zeros = torch.full((n, groups), 64, dtype=torch.uint8)
    bias = read_bias(tensors, n, name)
    weight: QWeight
    if bits in WORD_BITS and packed.shape[1] == words_for(k, bits) and perm is None and not spec.activation_bits:
        weight = WordWeight(packed, bits, k, scales, zeros, bias, group_size)
    else:
        codes = _unpack(packed, bits, k)
        codes = codes if perm is None else codes[:, perm].contiguous()
        weight = QWeight(f"w{8 if bits == 7 else bits}a16", codes, scales, zeros, perm, bias, group_size)
    return _with_inputs(with_live_scales(weight, "weight_scale", name), tensors, spec, name)


def _with_inputs(weight: QWeight, tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    """Return a weight-only weight with the rounding of activations that the config says."""
    if not spec.activation_bits:
        return weight
    rounding = rounding_of(spec)
    scheme = f"w{weight.bits}a8"
    plain = scheme == "w8a8" and weight.zeros is None and weight.scales.shape[1] == 1 and weight.perm is None
    if not rounding.is_separate and not plain and spec.activation_type is None:
        rounding = InputRounding(elements="int8")
    scale = positive_number(tensors, "input_scale", name) if spec.static_input else None
    zero = tensors.get("input_zero_point")
    if rounding.elements == "uint8" and spec.static_input:
        if zero is None or zero.numel() != 1 or zero.dtype not in (torch.int8, torch.int32, torch.int64):
            raise mismatch(name, "input_zero_point is missing or not one integer")
        if not -128 <= int(zero) <= 127:
            raise mismatch(name, f"input_zero_point is {int(zero)}, outside -128..127")
        rounding = replace(rounding, zero=int(zero))
    elif zero is not None and bool((zero.to(torch.float32) != 0).any()):
        raise error("format_unsupported", reason=f"{name} has activations with a zero point, and a config without")
    return replace(weight, scheme=scheme, input_scale=scale, rounding=rounding)


def width(words: int, k: int, likely: int) -> int | None:
    """Return the bits per code for K codes in this many words, ``likely`` if possible; None if no width fits."""
    if k <= 0:
        return None
    fitting = [bits for bits in (*SUPPORTED_BITS, 5, 6, 7) if words in (words_for(k, bits), gapped_words(k, bits))]
    return likely if likely in fitting else fitting[0] if fitting else None


def _unpack(words: Tensor, bits: int, count: int, dim: int = -1) -> Tensor:
    """``unpack`` for words with or without gaps."""
    dense = words.shape[dim] == words_for(count, bits)
    if dense and bits in SUPPORTED_BITS:
        return unpack(words, bits, dim=dim, count=count)
    rows = words.movedim(dim, -1)
    if dense:
        return unpack_stream(rows, bits)[:, :count].movedim(-1, dim).contiguous()
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=words.device)
    codes: Tensor = ((rows.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return codes[..., :count].movedim(-1, dim).contiguous()


def _read_zeros(stored: Tensor, n: int, groups: int, bits: int, name: str) -> Tensor | None:
    """Return zero points [N, ng] uint8 as codes, or None if all are 0, which is the code 2**(b-1)."""
    half = 2 ** (bits - 1)
    if stored.dtype == torch.int8:
        shaped(stored, (n, groups), "weight_zero_point", name)
        low, high = int(stored.min()), int(stored.max())
        if low < -half or high >= half:
            raise mismatch(name, f"weight_zero_point is {low if low < -half else high}, outside {-half}..{half - 1}")
        zeros = (stored.to(torch.int16) + half).to(torch.uint8)
    else:
        if width(stored.shape[0], n, bits) != bits:
            shaped(stored, (words_for(n, bits), groups), "weight_zero_point", name)
        zeros = _unpack(shaped(stored, (stored.shape[0], groups), "weight_zero_point", name), bits, n, dim=0)
    return None if bool((zeros == half).all()) else zeros


def _rows(scales: Tensor, n: int, name: str) -> Tensor:
    """Return scales [N, ng]; a single number is repeated for all."""
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1).contiguous()
    elif scales.shape == (n,):
        scales = scales.unsqueeze(1)
    if scales.dim() != 2:
        raise mismatch(name, f"weight_scale has shape {list(scales.shape)}, not 2 dimensions")
    return finite(shaped(scales, (n, scales.shape[1]), "weight_scale", name), "weight_scale", name)


def read_int8(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    weight = need(tensors, "weight", name, 2, torch.int8)
    n, k = weight.shape
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in _FLOATS:
        raise mismatch(name, "weight_scale is missing or not a float")
    scales = _rows(scales, n, name)
    groups = scales.shape[1]
    group_size = derive_group_size(k, groups, spec.group_size, "weight_scale", name)
    bits = spec.bits if spec.activation_bits and spec.bits in SCHEME_BITS.values() else 8
    half = 1 << (bits - 1)
    low, high = int(weight.min()), int(weight.max())
    if low < -half or high >= half:
        raise mismatch(name, f"weight is {low if low < -half else high}, outside the {bits} bits of the config")
    zeros = None
    if "weight_zero_point" in tensors:
        point = need(tensors, "weight_zero_point", name, tensors["weight_zero_point"].dim(), torch.int8)
        point = point.reshape(1, 1).expand(n, 1) if point.numel() == 1 else point
        point = point.unsqueeze(1) if point.shape == (n,) else point
        zeros = _read_zeros(point, n, groups, bits, name)
    codes = (weight.to(torch.int16) + half).to(torch.uint8)
    read = QWeight(
        scheme=f"w{bits}a16",
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )
    return _with_inputs(with_live_scales(read, "weight_scale", name), tensors, spec, name)
