"""compressed-tensors on disk: ``pack-quantized`` for weights alone, ``int-quantized`` with 8-bit activations.

For one linear with N outputs, K inputs, b bits and ng groups (one for per-channel scales):

    pack-quantized   weight_packed      [N, ceil(K*b/32)] int32, packed along K, code + 2**(b-1)
                     weight_scale       [N, ng] float
                     weight_shape       [2] int64: N, K
                     weight_zero_point  [ceil(N*b/32), ng] int32, packed along N, asymmetric only
                     weight_g_idx       [K] int32, act-order by group only
    int-quantized    weight             [N, K] int8           (``naive-quantized`` is the same on disk)
                     weight_scale       [N, 1] or [1] float
                     weight_zero_point  [N, 1] int8, asymmetric only
                     input_scale        [1] float, static activations only
    both             bias               [N], optional
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checks import derive_group_size, finite, mismatch, need, order_from_groups, read_bias, shaped
from aiakq.kernels.packing import pack, unpack, words_for
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight",
    "input_scale",
    "input_zero_point",
    "bias",
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """One linear from its tensors (suffix -> tensor). Raises ``tensor_mismatch`` and ``not_finite``."""
    if "weight_packed" in tensors:
        return _read_packed(tensors, spec, name)
    return _read_int8(tensors, spec, name)


def _read_packed(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    if spec.activation_bits:
        raise error("format_unsupported", reason=f"{name} has packed weights together with quantized activations")
    bits = spec.bits
    packed = need(tensors, "weight_packed", name, 2, torch.int32)
    shape = need(tensors, "weight_shape", name, 1, torch.int64, torch.int32).tolist()
    scales = need(tensors, "weight_scale", name, 2, *_FLOATS)
    if len(shape) != 2 or shape[0] != packed.shape[0] or words_for(max(shape[1], 0), bits) != packed.shape[1]:
        raise mismatch(name, f"weight_shape is {shape}, weight_packed {list(packed.shape)} at {bits} bits")
    n, k = shape
    groups = scales.shape[1]
    shaped(scales, (n, groups), "weight_scale", name)
    finite(scales, "weight_scale", name)
    group_size = derive_group_size(k, groups, spec.group_size, "weight_scale", name)
    codes = unpack(packed, bits, count=k)
    perm = None
    if "weight_g_idx" in tensors:
        perm = order_from_groups(tensors["weight_g_idx"], k, groups, group_size, "weight_g_idx", name)
        if perm is not None:
            codes = codes[:, perm].contiguous()
    zeros = None
    if "weight_zero_point" in tensors:
        words = need(tensors, "weight_zero_point", name, 2, torch.int32)
        shaped(words, (words_for(n, bits), groups), "weight_zero_point", name)
        zeros = unpack(words, bits, dim=0, count=n)
    elif not spec.symmetric:
        raise mismatch(name, "weight_zero_point is missing")
    return QWeight(
        scheme=spec.scheme,
        codes=codes,
        scales=scales,
        zeros=zeros,
        perm=perm,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )


def _read_int8(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    weight = need(tensors, "weight", name, 2, torch.int8)
    n, k = weight.shape
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in _FLOATS:
        raise mismatch(name, "weight_scale is missing or not a float")
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1).contiguous()
    if scales.dim() != 2:
        raise mismatch(name, f"weight_scale has shape {list(scales.shape)}, not 2 dimensions")
    groups = scales.shape[1]
    shaped(scales, (n, groups), "weight_scale", name)
    finite(scales, "weight_scale", name)
    zeros = None
    if "weight_zero_point" in tensors:
        point = need(tensors, "weight_zero_point", name, 2, torch.int8)
        zeros = (shaped(point, (n, groups), "weight_zero_point", name).to(torch.int16) + 128).to(torch.uint8)
        if bool((zeros == 128).all()):
            zeros = None
    input_scale = None
    if spec.static_input:
        stored = tensors.get("input_scale")
        if stored is None or stored.numel() != 1:
            raise mismatch(name, "input_scale is missing or not one number")
        input_scale = finite(stored.reshape(()).to(torch.float32), "input_scale", name)
        if float(input_scale) <= 0:
            raise mismatch(name, f"input_scale is {float(input_scale)}, which is no scale")
    input_zero = tensors.get("input_zero_point")
    if input_zero is not None and bool((input_zero != 0).any()):
        raise error("format_unsupported", reason=f"{name} has activations with a zero point")
    return QWeight(
        scheme=spec.scheme,
        codes=(weight.to(torch.int16) + 128).to(torch.uint8),
        scales=scales,
        zeros=zeros,
        bias=read_bias(tensors, n, name),
        group_size=derive_group_size(k, groups, spec.group_size, "weight_scale", name),
        input_scale=input_scale,
    )


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one linear: ``int-quantized`` for w8a8, ``pack-quantized`` for the rest.

    Packed scales are stored in ``dtype`` and must be representable in it already; w8a8 scales are float32.
    """
    if weight.perm is not None:
        raise mismatch("linear", "weight has its own input order, which compressed-tensors readers refuse")
    tensors: dict[str, Tensor] = {}
    if weight.scheme == "w8a8":
        tensors["weight"] = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        tensors["weight_scale"] = weight.scales.to(torch.float32)
        if weight.zeros is not None:
            tensors["weight_zero_point"] = (weight.zeros.to(torch.int16) - 128).to(torch.int8)
        if weight.input_scale is not None:
            tensors["input_scale"] = weight.input_scale.to(torch.float32).reshape(1)
    else:
        tensors["weight_packed"] = pack(weight.codes, weight.bits)
        tensors["weight_scale"] = weight.scales.to(dtype)
        tensors["weight_shape"] = torch.tensor([weight.n, weight.k], dtype=torch.int64)
        if weight.zeros is not None:
            tensors["weight_zero_point"] = pack(weight.zeros, weight.bits, dim=0)
    finite(tensors["weight_scale"], f"weight_scale (as {tensors['weight_scale'].dtype})", "linear")
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
