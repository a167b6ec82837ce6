"""AQLM (Egiazarian et al. 2024, arXiv:2401.06118): weights that are sums of vectors from code books, decoded at load.

For one linear with N outputs and K inputs, in groups of P outputs x G inputs, and C code books of B bits:

    codes      [N/P, K/G, C] int8 or int16, the low B bits count
    codebooks  [C, 2**B, P, G] float
    scales     [N/P, 1, 1, 1] float: a group is scales * (codebooks[0, code 0] + ... + codebooks[C - 1, code C - 1])
    bias       [N] float, optional

The formula is that of aqlm/utils.py, ``_dequantize_weight``; sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_integer, read_names, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.spec import QuantSpec

SUFFIXES = ("codes", "codebooks", "scales", "bias")
QUANT_METHODS = ("aqlm",)
RECORDS_METHOD = False

_KEYS = frozenset(
    "quant_method in_group_size out_group_size num_codebooks nbits_per_codebook linear_weights_not_to_quantize".split()
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_REASON = "AQLM's weights are sums of vectors from code books"


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or without scales."""
    return "codes" in headers and "codebooks" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    books, size, rows, group = spec.notes["sizes"]
    shapes: Shapes = {"codes": (n // rows, k // group, books), "codebooks": (books, size, rows, group)}
    return shapes | {"scales": (n // rows, 1, 1, 1)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    _, _, rows, group = headers["codebooks"].shape
    outer, inner, _ = headers["codes"].shape
    return Dimensions(outer * rows, inner * group, spec.bits, 1)


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of transformers' AqlmConfig. Raises ``format_unsupported``."""
    check_keys(config, _KEYS, "the quantization_config of AQLM")
    group, rows, books, bits = (
        read_integer(config.get(key, default), key)
        for key, default in (
            ("in_group_size", 8),
            ("out_group_size", 1),
            ("num_codebooks", 1),
            ("nbits_per_codebook", 16),
        )
    )
    if group < 1 or rows < 1 or books < 1 or not 1 <= bits <= 16:
        raise unsupported(f"AQLM with {books} code books of {bits} bits for groups of {rows} x {group}")
    skipped = read_names(config.get("linear_weights_not_to_quantize"), "linear_weights_not_to_quantize")
    nearest = round(books * bits / (group * rows))
    return QuantSpec(
        method="aqlm",
        format="aqlm",
        bits=next(width for width in (2, 3, 4, 5, 6, 8) if width >= min(nearest, 8)),
        ignore=tuple(name.removesuffix(".weight") for name in skipped),
        notes={"sizes": (books, 2**bits, rows, group)},
    )


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load: all are."""
    return _REASON


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers("aqlm")


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> DecodedWeight:
    """Read one linear from its tensors: values [N, K] float32. Raises ``tensor_mismatch`` and ``not_finite``."""
    books = finite(need(tensors, "codebooks", name, 4, *_FLOATS), "codebooks", name).to(torch.float32)
    codes = need(tensors, "codes", name, 3, torch.int8, torch.int16)
    count, size, rows, group = books.shape
    outer, inner = codes.shape[:2]
    if codes.shape[2] != count or size & (size - 1) or size > 2 ** (8 * codes.element_size()):
        raise mismatch(name, f"codes has shape {list(codes.shape)}, and codebooks {list(books.shape)}")
    scales = shaped(need(tensors, "scales", name, 4, *_FLOATS), (outer, 1, 1, 1), "scales", name)
    scales = finite(scales, "scales", name).to(torch.float32)
    values = torch.zeros(outer, inner, rows, group)
    for book, vectors in enumerate(books):
        values += vectors[codes[..., book].to(torch.int64) & (size - 1)]
    values = (values * scales).transpose(1, 2).reshape(outer * rows, inner * group)
    return DecodedWeight(values, read_bias(tensors, outer * rows, name), _REASON)
