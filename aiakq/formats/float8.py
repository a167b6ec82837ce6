"""The tensors of linears whose weights are 8-bit floats, which several formats share.

For one linear with N outputs and K inputs:

    weight                           [N, K] float8_e4m3fn or float8_e5m2
    weight_scale, weight_scale_inv   both: what codes are multiplied by, in float32, 16 bits or float8_e8m0:
                                     [], [1] or [1, 1] for all, [N] or [N, 1] per output, [N, K / G] per group,
                                     [ceil(N / R), ceil(K / G)] per block of R x G (also with dimensions of 1 between)
    input_scale, activation_scale    [] or [1] float, static activations only
    bias                             [N] float, optional
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.block_scales import exponents_of
from aiakq.formats.checks import finite, mismatch, need, positive_number, read_bias
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.formats.input_rounding import rounding_of
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

#: Names of the scales of weights and of activations.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("input_scale", "activation_scale")
SUFFIXES = ("weight", *WEIGHT_SCALES, *INPUT_SCALES, "bias")
#: Dtypes of safetensors headers.
DTYPES = ("F8_E4M3", "F8_E5M2")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a linear with 8-bit floats, complete or damaged."""
    weight = headers.get("weight")
    return weight is not None and weight.dtype in DTYPES and len(weight.shape) == 2


def has_scale(headers: Headers) -> bool:
    """Whether the linear is complete enough to be recognized."""
    return holds_codes(headers) and any(name in headers for name in WEIGHT_SCALES)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int, scale_name: str) -> Shapes:
    """Return suffix -> shape of a linear of N x K; ``scale_name`` is expected if it has no scale."""
    name = next((name for name in WEIGHT_SCALES if name in headers), scale_name)
    expected = _scale_shape(spec, n, k)
    stored = tuple(headers[name].shape) if name in headers else expected
    fits = _layout(stored, spec, n, k) is not None
    shapes: Shapes = {"weight": (n, k), name: stored if fits else expected}
    if spec.static_input:
        static = next((name for name in INPUT_SCALES if name in headers), INPUT_SCALES[0])
        shape = tuple(headers[static].shape) if static in headers else (1,)
        shapes[static] = shape if shape in ((), (1,), (1, 1)) else (1,)
    return shapes


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for other headers."""
    n, k = headers["weight"].shape
    stored = next((headers[name].shape for name in WEIGHT_SCALES if name in headers), None)
    if stored is None:
        raise KeyError("weight_scale")
    layout = _layout(tuple(stored), spec, n, k)
    if layout is None:
        raise ValueError("weight_scale has another shape")
    static = any(name in headers for name in INPUT_SCALES)
    return Dimensions(n, k, 8, -(-k // layout[1]), static_input=spec.static_input and static)


def _scale_shape(spec: QuantSpec, n: int, k: int) -> tuple[int, ...]:
    rows = 1 if spec.float8 is None else spec.float8.rows
    if rows == -1:
        return ()
    return -(-n // rows), 1 if spec.group_size == -1 else -(-k // spec.group_size)


def _layout(shape: tuple[int, ...], spec: QuantSpec, n: int, k: int) -> tuple[int, int] | None:
    """Return the (rows, inputs) that share a scale if scales have this shape, or None."""
    expected = _scale_shape(spec, n, k)
    if shape in ((), (1,), (1, 1)):
        # One scale where the config says one per output or block is what is left of others.
        return (n, k) if math.prod(expected) == 1 else None
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        shape = shape[0], shape[2]
    if spec.float8 is not None and shape == expected:
        return spec.float8.rows, k if spec.group_size == -1 else spec.group_size
    return (1, k) if shape in ((n,), (n, 1)) else None


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    """Read one linear: codes [N, K] uint8, scales [N, ceil(K / G)] float, one row for each output.

    Raises ``tensor_mismatch``, ``not_finite``, and ``format_unsupported`` if the config says that codes are integers.
    """
    weight = need(tensors, "weight", name, 2, torch.float8_e4m3fn, torch.float8_e5m2)
    if spec.float8 is None:
        reason = f"{name} has 8-bit floats as weights, and the config says that they are integers"
        raise error("format_unsupported", reason=reason)
    n, k = weight.shape
    codes = weight.contiguous().view(torch.uint8)
    _check_codes(codes, weight.dtype, name)
    suffix = _only(tensors, WEIGHT_SCALES, name)
    if suffix is None:
        raise mismatch(name, "weight_scale is missing")
    stored = finite(_as_float(tensors[suffix], suffix, name), suffix, name)
    layout = _layout(tuple(stored.shape), spec, n, k)
    if layout is None:
        expected = list(_scale_shape(spec, n, k))
        raise mismatch(name, f"{suffix} has shape {list(stored.shape)}, expected {expected}")
    rows, group = layout
    blocks = stored.reshape(-(-n // rows), -(-k // group))
    scales = blocks.repeat_interleave(rows, dim=0)[:n].contiguous()
    _check_zeros(scales, codes, group, suffix, name)
    return QWeight(
        scheme=spec.scheme,
        codes=codes,
        scales=scales,
        bias=read_bias(tensors, n, name),
        group_size=group,
        input_scale=_input_scale(tensors, name) if spec.static_input else None,
        code_type=weight.dtype,
        rounding=rounding_of(spec),
    )


def _as_float(scale: Tensor, suffix: str, name: str) -> Tensor:
    """Return scales in float32 or 16 bits; those in float8_e8m0 are powers of two, 2**(bits - 127), or NaN."""
    if scale.dtype in _FLOATS:
        return scale
    if scale.dtype not in (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)):
        raise mismatch(name, f"{suffix} is {str(scale.dtype).removeprefix('torch.')}, not a float")
    exponents = scale.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(exponents == 0, torch.full_like(exponents, 1 << 22), exponents << 23)
    return bits.view(torch.float32)


def _check_codes(codes: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise ``not_finite`` for codes that are NaN or infinite."""
    lowest = 0x7F if dtype == torch.float8_e4m3fn else 0x7C
    if bool(((codes & 0x7F) >= lowest).any()):
        hint = "The checkpoint is damaged; download it or quantize the model again."
        raise error("not_finite", what=f"{name}.weight", hint=hint)


def _check_zeros(scales: Tensor, codes: Tensor, group: int, suffix: str, name: str) -> None:
    """Raise ``tensor_mismatch`` for a scale of 0 whose weights are not: it underflowed, and they are lost."""
    dead = scales == 0
    for output, number in dead.nonzero()[:4096].tolist() if bool(dead.any()) else ():
        if bool((codes[output, number * group : (number + 1) * group] & 0x7F).any()):
            raise mismatch(name, f"{suffix} is 0 for output {output}, group {number}, whose codes are not")


def _only(tensors: Mapping[str, Tensor], names: tuple[str, ...], name: str) -> str | None:
    """Return which of two names of the same scale there is, or None. Raises ``tensor_mismatch`` for both."""
    found = [suffix for suffix in names if suffix in tensors]
    if len(found) > 1:
        raise mismatch(name, f"there are {' and '.join(found)}, which say the same")
    return found[0] if found else None


def _input_scale(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return positive_number(tensors, _only(tensors, INPUT_SCALES, name) or INPUT_SCALES[0], name)


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype, scale_name: str) -> dict[str, Tensor]:
    """Return the tensors of one linear: the inverse of ``read``. Scales are float32, or in e8m0 if ``spec`` says so;
    the bias is in ``dtype``.

    Raises ``tensor_mismatch`` for a weight whose codes are integers, or whose scales differ within a block, or are not
    those of ``spec``.
    """
    if weight.code_type is None or spec.float8 is None:
        raise not_float8(weight)
    scales, rows = weight.scales.to(torch.float32), spec.float8.rows
    kept = scales[:: weight.n if rows == -1 else rows]
    if not torch.equal(kept.repeat_interleave(weight.n if rows == -1 else rows, dim=0)[: weight.n], scales):
        raise mismatch("linear", f"weight has rows with other scales in a block of {rows}")
    kept = exponents_of(kept) if spec.scale_type == "e8m0" else kept.reshape(()) if rows == -1 else kept
    tensors = {"weight": weight.codes.view(weight.code_type), scale_name: kept}
    if weight.input_scale is not None:
        tensors[INPUT_SCALES[0]] = weight.input_scale.to(torch.float32).reshape(1)
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}


def not_float8(weight: QWeight) -> AiakqError:
    """Return the error for a weight that is to be written as 8-bit floats and is not one."""
    return mismatch("linear", f"weight is {weight.scheme}, not 8-bit floats with scales")
