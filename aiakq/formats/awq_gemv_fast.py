"""AWQ, AutoAWQ's GEMV-fast layout (llm-awq's second kernel): four rows interleaved in 16-bit words.

For one linear with N outputs, K inputs and ng groups, always 4 bits:

    qweight  [N/4, K] int16    codes, interleaved as below
    scales   [R, N] float16    R >= ng rows, the rest padding
    qzeros   [R, N] float16    -(scale * zero), already multiplied; llm-awq calls it scaled_zeros
    bias     [N]               optional

``W[n, k] = q * scale + qzero``. Integer zero points are recovered by rounding, since the product was rounded to 16
bits; files with fractional zero points keep them as floats.

Each row is first reordered (see ``_ORDER``); then word w of rows 4r .. 4r + 3 and of 64 columns holds, lowest bits
first, positions 4w .. 4w + 3 of the concatenation of those four rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats import auto_awq
from aiakq.formats.awq_gemv import padded_words
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, stored_size
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("qweight", "qzeros", "scaled_zeros", "scales", "bias")
QUANT_METHODS, holds_codes, supports = auto_awq.QUANT_METHODS, auto_awq.holds_codes, auto_awq.supports
ZERO_POINTS = auto_awq.ZERO_POINTS
scale_dtype, reader_notes = auto_awq.scale_dtype, auto_awq.reader_notes
#: Values of ``version`` with this layout on disk; the first is written.
VERSIONS = ("gemv_fast",)

_ROWS, _COLUMNS = 4, 64
#: Maximum error of a zero point of at most 15 due to rounding -(scale * zero) to 16 bits: 15 / 2**8 for bfloat16.
_ROUNDING = 0.06
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Position p of 32 adjacent columns holds column _ORDER[p].
_ORDER = torch.arange(32).reshape(4, 4, 2).permute(1, 0, 2).reshape(4, 4, 2).transpose(1, 2).flatten()


def matches(headers: Headers) -> bool:
    """Whether the shapes and dtypes match this layout."""
    return matrix(headers, "qweight", "I16") is not None and matrix(headers, "scales") is not None


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    groups = expected_groups(spec, k)
    padded = padded_words(groups, spec.group_size if spec.group_size > 0 else k) * 8
    zeros = "scaled_zeros" if "scaled_zeros" in headers else "qzeros"
    rows = stored_size(headers, ("scales", zeros), 0, padded, lambda rows: rows >= groups)
    return {"qweight": (n // _ROWS, k), "scales": (rows, n), zeros: (rows, n)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for headers of another layout."""
    blocks, k = headers["qweight"].shape
    return Dimensions(blocks * _ROWS, k, 4, k // spec.group_size if spec.group_size > 0 else 1)


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written, or None."""
    if n % _ROWS or k % _COLUMNS:
        return f"these AWQ files hold multiples of {_ROWS} outputs and {_COLUMNS} inputs"
    if spec.group_size > 0 and k % spec.group_size and k > spec.group_size:
        return f"these AWQ files hold whole groups of {spec.group_size} inputs"
    return None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    return _COLUMNS, _ROWS


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config, or None if it describes another layout. Raises ``format_unsupported``."""
    return auto_awq.from_config(config, "awq_gemv_fast", VERSIONS)


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of ``spec``. Raises ``option_conflict`` if layers differ."""
    return auto_awq.to_config(spec, VERSIONS[0])


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors.

    tensors  suffix -> tensor, with the shapes and dtypes in the module's docstring; not modified.
    name     of the linear, for messages.

    Returns codes [N, K] uint8, scales [N, ng] in the stored dtype, zeros [N, ng] uint8 or float32 or None.
    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    qweight = need(tensors, "qweight", name, 2, torch.int16)
    scales = need(tensors, "scales", name, 2, *_FLOATS)
    suffix = "scaled_zeros" if "scaled_zeros" in tensors else "qzeros"
    scaled = need(tensors, suffix, name, 2, *_FLOATS)
    n, k = qweight.shape[0] * _ROWS, qweight.shape[1]
    # Padding hides the number of groups, so it is taken from the config.
    group_size = k if spec.group_size == -1 else spec.group_size
    if k % group_size or k % _COLUMNS:
        raise mismatch(name, f"qweight has {k} inputs, which are no whole groups of {group_size} and {_COLUMNS}")
    groups = k // group_size
    if scales.shape[0] < groups:
        raise mismatch(name, f"scales has {scales.shape[0]} rows for {groups} groups")
    shaped(scales, (scales.shape[0], n), "scales", name)
    shaped(scaled, tuple(scales.shape), suffix, name)
    scale = finite(scales[:groups].T.contiguous(), "scales", name)
    product = finite(scaled[:groups].T.to(torch.float32), suffix, name)
    codes = _unpack(qweight)
    if bool((product[scale == 0] != 0).any()):
        raise mismatch(name, f"{suffix} is not zero where the scale is")
    zeros: Tensor | None = _zeros(product, scale, codes[:, ::group_size], suffix, name)
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    weight = QWeight(
        scheme="w4a16",
        codes=codes,
        scales=scale,
        zeros=zeros,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )
    return with_live_scales(weight, "scales", name)


def _zeros(product: Tensor, scale: Tensor, first: Tensor, suffix: str, name: str) -> Tensor:
    """Return -product / scale [N, ng]: uint8 if all are integers up to rounding, else float32.

    With a scale of 0 the zero point is undefined; the ``first`` code of the group replaces it, as all its codes should.
    """
    zeros = torch.where(scale == 0, first.to(torch.float32), -product / scale.to(torch.float32))
    whole = zeros.round()
    if bool(((zeros - whole).abs() <= _ROUNDING).all()):
        zeros = whole
    outside = (zeros < 0) | (zeros > 15)
    if bool(outside.any()):
        raise mismatch(name, f"{suffix} means a zero point of {float(zeros[outside][0]):.4g}, outside 0..15")
    return zeros.to(torch.uint8) if zeros is whole else zeros


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear on the CPU, with shapes and dtypes as in the module docstring; bias in
    ``dtype``.

    Raises ``not_finite`` when a scale overflows float16, ``tensor_mismatch`` for weights the layout cannot hold.
    """
    n, k, group_size = weight.n, weight.k, weight.group_size
    if weight.bits != 4 or weight.perm is not None or n % _ROWS or k % _COLUMNS or k % group_size:
        raise mismatch("linear", f"weight is {weight.scheme}, {n} x {k}; this layout cannot hold it")
    groups = weight.scales.shape[1]
    rows = padded_words(groups, group_size) * 8
    zeros = weight.zeros if weight.zeros is not None else torch.full((n, groups), 8, dtype=torch.uint8)
    scales = finite(weight.scales.to(torch.float16), "scales (as float16)", "linear")
    product = finite(-(scales.float() * zeros.float()).to(torch.float16), "qzeros (as float16)", "linear")
    padding = (0, rows - groups)
    tensors = {
        "qweight": _pack(weight.codes),
        "scales": torch.nn.functional.pad(scales, padding).T,
        "qzeros": torch.nn.functional.pad(product, padding).T,
    }
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}


def _unpack(words: Tensor) -> Tensor:
    """int16 [N/4, K] -> codes [N, K] uint8 in natural order."""
    blocks, k = words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    places = ((words.to(torch.int32).unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
    # [N/4, K/64, 64 words, 4 fields] is [4 rows, 64 columns] read in order.
    rows = places.reshape(blocks, k // _COLUMNS, _ROWS, _COLUMNS).transpose(1, 2).reshape(blocks * _ROWS, k // 32, 32)
    return rows[..., torch.argsort(_ORDER)].reshape(blocks * _ROWS, k).contiguous()


def _pack(codes: Tensor) -> Tensor:
    """codes [N, K] -> int16 [N/4, K]."""
    n, k = codes.shape
    rows = (
        codes.to(torch.int32).reshape(n, k // 32, 32)[..., _ORDER].reshape(n // _ROWS, _ROWS, k // _COLUMNS, _COLUMNS)
    )
    places = rows.transpose(1, 2).reshape(n // _ROWS, k, 4)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=codes.device)
    words = (places << shifts).sum(-1, dtype=torch.int32)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
