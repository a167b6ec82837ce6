"""Marlin (Frantar and Alistarh 2024, arXiv:2408.11743): 4-bit weights in the order of its kernel, which is undone.

For one linear with N outputs, K inputs and groups of G inputs, symmetric:

    B or qweight  [K/16, 2*N] int32   codes, W = (code - 8) * scale, eight in a word, the lowest bits first
    s or scales   [K/G, N] float16    permuted within 64 outputs; with one scale per output, within 32
    workspace     memory of the kernel, optional
    bias          [N] float, optional

Codes are cut into tiles of 16 inputs x 16 outputs, and the 1024 codes of four tiles that are adjacent along N are
permuted as the tensor cores read them (``code_order``). AutoGPTQ's files say is_marlin_format or checkpoint_format
marlin, AutoAWQ's version marlin.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aiakq.formats.bit_stream import unpack_stream
from aiakq.formats.checks import finite, mismatch, need, read_bias, with_live_scales
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import APPLIED, check_keys
from aiakq.formats.config_values import (
    first_of,
    read_flag,
    read_group_size,
    read_integer,
    read_names,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

_CODES, _SCALES = ("B", "qweight"), ("s", "scales")
SUFFIXES = (*_CODES, *_SCALES, "workspace", "bias")
QUANT_METHODS = ("marlin", "gptq", "awq")
RECORDS_METHOD = False

_TILE = 16


@functools.cache
def code_order() -> tuple[int, ...]:
    """Return where in four tiles, 256 * tile + 16 * input + output, each of 1024 stored codes belongs.

    Thread t of a warp holds, of each tile, inputs 2c, 2c + 1, 2c + 8, 2c + 9 with c = t mod 4, of outputs t div 4 and
    8 more. Of the eight, those in even places come first.
    """
    order: list[int] = []
    for thread in range(32):
        inputs = [2 * (thread % 4) + step for step in (0, 1, 8, 9)]
        held = [16 * row + thread // 4 + column for column in (0, 8) for row in inputs]
        for tile in range(4):
            order += [256 * tile + place for place in (*held[0::2], *held[1::2])]
    return tuple(order)


@functools.cache
def scale_order(grouped: bool) -> tuple[int, ...]:
    """Return the output, of 64, or 32 if not ``grouped``, to which each stored scale belongs."""
    if grouped:
        return tuple(first + 8 * step for first in range(8) for step in range(8))
    return tuple(2 * first + step for first in range(4) for step in (0, 1, 8, 9, 16, 17, 24, 25))


def natural_codes(words: Tensor, order: Sequence[int]) -> Tensor:
    """Return the codes [N, K] uint8 of words [K/16, 2*N] int32, stored in ``order``."""
    stored = unpack_stream(words, 4).view(-1, len(order))
    tiles = torch.empty_like(stored)
    tiles[:, list(order)] = stored
    rows, outputs = words.shape[0], words.shape[1] // 2
    return tiles.view(rows, outputs // _TILE, _TILE, _TILE).permute(1, 3, 0, 2).reshape(outputs, -1).contiguous()


def natural_scales(stored: Tensor, grouped: bool) -> Tensor:
    """Return the scales [N, ng] of stored ones [ng, N]."""
    order = list(scale_order(grouped))
    parts = stored.reshape(-1, len(order))
    scales = torch.empty_like(parts)
    scales[:, order] = parts
    return scales.view(stored.shape).T.contiguous()


# --- headers ----------------------------------------------------------------------------------------------------------


def _pair(headers: Mapping[str, object]) -> tuple[str, str]:
    """Return the names of codes and scales."""
    return (_CODES[0], _SCALES[0]) if _CODES[0] in headers or _SCALES[0] in headers else (_CODES[1], _SCALES[1])


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return _CODES[0] in headers and headers[_CODES[0]].dtype == "I32"


def matches(headers: Headers) -> bool:
    """Whether shapes and dtypes match this layout."""
    codes, scales = (headers.get(name) for name in _pair(headers))
    if codes is None or scales is None or codes.dtype != "I32" or len(codes.shape) != 2 or len(scales.shape) != 2:
        return False
    return codes.shape[1] == 2 * scales.shape[1]


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    codes, scales = _pair(headers)
    groups = 1 if spec.group_size == -1 else -(-k // spec.group_size)
    return {codes: (k // _TILE, 2 * n), scales: (groups, n)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    codes, scales = _pair(headers)
    rows, words = headers[codes].shape
    return Dimensions(words // 2, rows * _TILE, 4, headers[scales].shape[0])


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config, or None if it describes another layout. Raises ``format_unsupported``."""
    said = {read_word(config, key, default="") for key in ("quant_method", "checkpoint_format", "format", "version")}
    if "marlin" not in said and not read_flag(config.get("is_marlin_format"), "is_marlin_format"):
        return None
    check_keys(config, APPLIED["gptq"], "the quantization_config of Marlin")
    for key in ("dynamic", "rotation"):
        if not says_nothing(config.get(key)):
            raise unsupported(f"Marlin with {key} {config[key]!r:.60}")
    bits = read_integer(first_of(config, "bits", "w_bit", default=4), "bits")
    asymmetric = read_flag(config.get("zero_point"), "zero_point") or not read_flag(config.get("sym", True), "sym")
    if bits != 4 or asymmetric or read_flag(config.get("desc_act"), "desc_act"):
        raise unsupported(f"Marlin with {bits} bits, zero points or an order of the inputs")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="awq" if "w_bit" in config or read_word(config, "quant_method", default="") == "awq" else "gptq",
        format="marlin",
        bits=4,
        group_size=read_group_size(first_of(config, "group_size", "q_group_size", default=-1)),
        ignore=tuple(f"*{name}*" for name in skipped) or ("lm_head",),
    )


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales [N, ng] float, both in their natural order.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    of_codes, of_scales = _pair(tensors)
    words = need(tensors, of_codes, name, 2, torch.int32)
    stored = need(tensors, of_scales, name, 2, torch.float16, torch.bfloat16)
    n, k, groups = words.shape[1] // 2, words.shape[0] * _TILE, stored.shape[0]
    if n % 64 or stored.shape[1] != n or k % groups:
        raise mismatch(name, f"{of_codes} has shape {list(words.shape)} and {of_scales} {list(stored.shape)}")
    if groups != (1 if spec.group_size == -1 else max(1, k // spec.group_size)):
        raise mismatch(name, f"{of_scales} has {groups} groups, not those of {spec.group_size} inputs")
    codes = natural_codes(words, code_order())
    # The kernel has one scale per output where a group is all of the inputs.
    scales = natural_scales(finite(stored, of_scales, name), grouped=groups > 1)
    bias = read_bias(tensors, n, name)
    weight = QWeight(scheme="w4a16", codes=codes, scales=scales, bias=bias, group_size=k // groups)
    return with_live_scales(weight, of_scales, name)
