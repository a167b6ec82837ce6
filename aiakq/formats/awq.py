"""AWQ, AutoAWQ's GEMM layout.

For one linear with N outputs, K inputs and ng groups, always 4 bits:

    qweight  [K, N/8] int32   codes packed along N, interleaved
    qzeros   [ng, N/8] int32  zero points, same interleave, no offset; absent if all are 8 (symmetric)
    scales   [ng, N] float16
    bias     [N]              optional

Field i of word c holds output ``8*c + ORDER[i]``. ``W[n, k] = (q[k, n] - zero[g, n]) * scales[g, n]``, g = k // G.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aiakq.formats import auto_awq
from aiakq.formats.checks import derive_group_size, finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.compatibility import EXPERTS_NOT_FOUND, Readers
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, stored_size
from aiakq.kernels.packing import pack
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("qweight", "qzeros", "scales", "bias")
QUANT_METHODS, holds_codes, supports = auto_awq.QUANT_METHODS, auto_awq.holds_codes, auto_awq.supports
ZERO_POINTS = auto_awq.ZERO_POINTS
scale_dtype, reader_notes = auto_awq.scale_dtype, auto_awq.reader_notes
#: Values of ``version`` with this layout on disk; the first is written, the others name kernels.
VERSIONS = ("gemm", "exllama", "exllamav2", "ipex")
#: Config file of early AutoAWQ versions.
CONFIG_FILE = "quant_config.json"

#: The output, of 8 adjacent ones, that each 4-bit field of a word holds, and the inverse.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
#: Words that are unpacked at once.
_CHUNK = 1 << 17


def matches(headers: Headers) -> bool:
    """Whether the shapes and dtypes match this layout."""
    codes, scales = matrix(headers, "qweight", "I32"), matrix(headers, "scales")
    return codes is not None and scales is not None and codes.shape[1] * 8 == scales.shape[1]


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    groups = stored_size(headers, ("scales", "qzeros"), 0, expected_groups(spec, k), lambda size: k % size == 0)
    shapes: Shapes = {"qweight": (k, n // 8), "scales": (groups, n)}
    return shapes | ({"qzeros": (groups, n // 8)} if "qzeros" in headers or not spec.symmetric else {})


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for headers of another layout."""
    k, words = headers["qweight"].shape
    return Dimensions(words * 8, k, 4, headers["scales"].shape[0])


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written, or None."""
    return "AWQ files hold multiples of 8 outputs" if n % 8 else None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    return 1, 8


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model with these schemes; ``experts``: whether it has any."""
    return Readers("gptqmodel", EXPERTS_NOT_FOUND if experts else "", vllm=True, vllm_note="")


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config, or None if it describes another layout. Raises ``format_unsupported``."""
    return auto_awq.from_config(config, "awq", VERSIONS)


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
    k, n = qweight.shape[0], qweight.shape[1] * 8
    groups = scales.shape[0]
    shaped(scales, (groups, n), "scales", name)
    finite(scales, "scales", name)
    group_size = derive_group_size(k, groups, spec.group_size, "scales", name)
    zeros: Tensor | None = None
    if "qzeros" in tensors:
        qzeros = need(tensors, "qzeros", name, 2, torch.int32)
        zeros = _unpack(shaped(qzeros, (groups, n // 8), "qzeros", name))
        if bool((zeros == 8).all()):
            zeros = None
    elif not spec.symmetric:
        raise mismatch(name, "qzeros is missing")
    codes, scales = _unpack(qweight), scales.T.contiguous()
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
    if weight.bits != 4 or weight.perm is not None:
        raise mismatch("linear", f"weight is {weight.scheme} with its own input order; AWQ files hold neither")
    if weight.n % 8 or weight.k % weight.group_size:
        raise mismatch(
            "linear",
            f"weight is {weight.n} x {weight.k}; AWQ files need outputs in eights and whole groups of "
            f"{weight.group_size} inputs",
        )
    groups = weight.scales.shape[1]
    zeros = weight.zeros.T if weight.zeros is not None else torch.full((groups, weight.n), 8, dtype=torch.uint8)
    tensors = {
        "qweight": _pack(weight.codes.T),
        "qzeros": _pack(zeros),
        "scales": finite(weight.scales.T.to(torch.float16).contiguous(), "scales (as float16)", "linear"),
    }
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}


def _unpack(words: Tensor) -> Tensor:
    """int32 [R, N/8] -> uint8 [N, R] in natural order; some words at a time, which stay in a cache."""
    columns = words.T.contiguous()
    codes = torch.empty(len(columns), 8, len(words), dtype=torch.uint8, device=words.device)
    step = max(1, _CHUNK // max(1, len(words)))
    # No memory is allocated in the loop: new pages would take longer than the arithmetic.
    spare = torch.empty_like(columns[:step])
    for part, out in zip(columns.split(step), codes.split(step), strict=True):
        moved = spare[: len(part)]
        for output, field in enumerate(INVERSE):
            torch.bitwise_right_shift(part, 4 * field, out=moved)
            moved &= 15
            out[:, output] = moved
    return codes.flatten(0, 1)


def _pack(codes: Tensor) -> Tensor:
    """[R, N] codes in natural order -> int32 [R, N/8]."""
    octets: Tensor = codes.unflatten(-1, (-1, 8))
    return pack(octets[..., list(ORDER)].flatten(-2), 4)
