"""AWQ, AutoAWQ's GEMV layout: packed along K in natural order.

For one linear with N outputs, K inputs and ng groups, always 4 bits:

    qweight  [N, K/8] int32   codes packed along K
    qzeros   [N, W] int32     zero points packed along K's groups, W padded
    scales   [N, W*8] float16, padded like the zero points
    bias     [N]              optional

W is ceil(ng / 8), rounded up to a multiple of 1 for G >= 128, 2 for G = 64, 4 for G = 32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats import auto_awq
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix
from aiakq.kernels.packing import pack, unpack
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("qweight", "qzeros", "scales", "bias")
QUANT_METHODS, holds_codes, supports = auto_awq.QUANT_METHODS, auto_awq.holds_codes, auto_awq.supports
ZERO_POINTS = auto_awq.ZERO_POINTS
scale_dtype, reader_notes = auto_awq.scale_dtype, auto_awq.reader_notes
#: Values of ``version`` with this layout on disk; the first is written.
VERSIONS = ("gemv", "llm-awq")


def padded_words(groups: int, group_size: int) -> int:
    """Return W for this many groups."""
    words = -(-groups // 8)
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    return -(-words // multiple) * multiple


def matches(headers: Headers) -> bool:
    """Whether the shapes and dtypes match this layout."""
    codes, scales = matrix(headers, "qweight", "I32"), matrix(headers, "scales")
    return codes is not None and scales is not None and codes.shape[0] == scales.shape[0]


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    words = padded_words(expected_groups(spec, k), spec.group_size if spec.group_size > 0 else k)
    shapes: Shapes = {"qweight": (n, k // 8), "scales": (n, words * 8)}
    return shapes | ({"qzeros": (n, words)} if "qzeros" in headers or not spec.symmetric else {})


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for headers of another layout."""
    n, words = headers["qweight"].shape
    k = words * 8
    return Dimensions(n, k, 4, k // spec.group_size if spec.group_size > 0 else 1)


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written, or None."""
    if spec.group_size > 0 and k % spec.group_size and k > spec.group_size:
        return f"these AWQ files hold whole groups of {spec.group_size} inputs"
    return "these AWQ files hold multiples of 8 inputs" if k % 8 else None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    return 8, 1


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config, or None if it describes another layout. Raises ``format_unsupported``."""
    return auto_awq.from_config(config, "awq_gemv", VERSIONS)


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of ``spec``. Raises ``option_conflict`` if layers differ."""
    return auto_awq.to_config(spec, VERSIONS[0])


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors.

    tensors  suffix -> tensor, with the shapes and dtypes in the module's docstring; not modified.
    name     of the linear, for messages.

    Returns codes [N, K] uint8, scales [N, ng] in the stored dtype, zeros [N, ng] uint8 or None.
    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    qweight = need(tensors, "qweight", name, 2, torch.int32)
    scales = need(tensors, "scales", name, 2, torch.float16, torch.bfloat16, torch.float32)
    n, k = qweight.shape[0], qweight.shape[1] * 8
    # Padding hides the number of groups, so it is taken from the config.
    group_size = k if spec.group_size == -1 else spec.group_size
    if k % group_size:
        raise mismatch(name, f"qweight has {k} inputs, which are no whole groups of {group_size}")
    groups = k // group_size
    words = padded_words(groups, group_size)
    shaped(scales, (n, words * 8), "scales", name)
    scales = finite(scales[:, :groups].contiguous(), "scales", name)
    zeros: Tensor | None = None
    if "qzeros" in tensors:
        qzeros = need(tensors, "qzeros", name, 2, torch.int32)
        zeros = unpack(shaped(qzeros, (n, words), "qzeros", name), 4, count=groups)
        if bool((zeros == 8).all()):
            zeros = None
    elif not spec.symmetric:
        raise mismatch(name, "qzeros is missing")
    codes = unpack(qweight, 4)
    weight = QWeight(
        scheme="w4a16",
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )
    return with_live_scales(weight, "scales", name)


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear on the CPU, with shapes and dtypes as in the module docstring; bias in
    ``dtype``.

    Raises ``not_finite`` when a scale overflows float16, ``tensor_mismatch`` for weights the layout cannot hold.
    """
    if weight.bits != 4 or weight.perm is not None or weight.k % 8 or weight.k % weight.group_size:
        raise mismatch("linear", f"weight is {weight.scheme}, {weight.n} x {weight.k}; AWQ files cannot hold it")
    groups = weight.scales.shape[1]
    padding = (0, padded_words(groups, weight.group_size) * 8 - groups)
    zeros = weight.zeros if weight.zeros is not None else torch.full((weight.n, groups), 8, dtype=torch.uint8)
    scales = torch.nn.functional.pad(weight.scales.to(torch.float16), padding)
    tensors = {
        "qweight": pack(weight.codes, 4),
        "qzeros": pack(torch.nn.functional.pad(zeros.to(torch.uint8), padding), 4),
        "scales": finite(scales, "scales (as float16)", "linear"),
    }
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
