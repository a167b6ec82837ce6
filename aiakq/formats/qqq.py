"""QQQ (Zhang et al. 2024, arXiv:2406.09904): 4-bit weights beside int8 activations, in the order of its kernel.

For one linear with N outputs, K inputs and groups of G inputs, symmetric:

    B          [K/16, 2*N] int32, 4-bit codes in tiles as Marlin has them, in another order (``code_order``)
    s_channel  [1, N] float32, permuted within 32 outputs
    s_group    [K/G, N] float16, permuted within 64 outputs; empty for one scale per output
    workspace, reduce_buffer   memory of the kernel, optional
    bias       [N] float, optional

The kernel multiplies int8 by int8. With one scale per output, the weight is 16 * code, signed, times s_channel; with
groups it is (code - 8) * s_group, rounded to the nearest integer with ties to even, and kept in 8 bits, times
s_channel (``dequant_per_group`` in QQQ's csrc). Activations are rounded per token, max|x| / 127.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import APPLIED, check_keys
from aiakq.formats.config_values import first_of, read_flag, read_group_size, read_integer, read_names, unsupported
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.formats.marlin import natural_codes, natural_scales
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("B", "s_channel", "s_group", "workspace", "reduce_buffer", "bias")
QUANT_METHODS = ("qqq",)
RECORDS_METHOD = False

_TILE = 16


@functools.cache
def code_order(grouped: bool) -> tuple[int, ...]:
    """Return where in four tiles, 256 * tile + 16 * input + output, each of 1024 stored codes belongs.

    Thread t of a warp holds, of each tile, inputs 4c to 4c + 3 with c = t mod 4, of outputs t div 4 and 8 more. With
    groups, those in even places come first; else the outputs alternate, the upper ones first.
    """
    places = (0, 2, 4, 6, 1, 3, 5, 7) if grouped else (4, 0, 5, 1, 6, 2, 7, 3)
    order: list[int] = []
    for thread in range(32):
        inputs = [4 * (thread % 4) + step for step in range(4)]
        held = [16 * row + thread // 4 + column for column in (0, 8) for row in inputs]
        for tile in range(4):
            order += [256 * tile + held[place] for place in places]
    return tuple(order)


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or without codes."""
    return "s_channel" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    shapes: Shapes = {"B": (k // _TILE, 2 * n), "s_channel": (1, n)}
    if not _is_grouped(spec, k):
        return shapes
    return shapes | {"s_group": (k // spec.notes["packed_groups"], n)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups of the weight that is multiplied, int8 with one scale per output."""
    rows, words = headers["B"].shape
    return Dimensions(words // 2, rows * _TILE, 8, 1)


def _is_grouped(spec: QuantSpec, k: int) -> bool:
    size: int = spec.notes.get("packed_groups", -1)
    return 0 < size < k


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config by QQQ or GPTQModel: weights are 8 bits once their groups are multiplied in.

    Raises ``format_unsupported``.
    """
    check_keys(config, APPLIED["gptq"], "the quantization_config of QQQ")
    bits = read_integer(first_of(config, "wbits", "bits", "w_bit", default=4), "bits")
    size = read_group_size(first_of(config, "group_size", "q_group_size", default=-1))
    symmetric = read_flag(config.get("sym", True), "sym")
    order = read_flag(config.get("desc_act"), "desc_act")
    if bits != 4 or not symmetric or order or config.get("rotation") or config.get("dynamic"):
        raise unsupported("QQQ with other than 4 symmetric bits for all layers in their natural order")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="qqq",
        format="qqq",
        bits=8,
        activation_bits=8,
        ignore=tuple(f"*{name}*" for name in skipped) or ("lm_head",),
        notes={"packed_groups": size},
    )


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors: scheme w8a8, codes [N, K] uint8, scales [N, 1] float32.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    words = need(tensors, "B", name, 2, torch.int32)
    n, k = words.shape[1] // 2, words.shape[0] * _TILE
    if n % 64 or words.shape[1] % 2:
        raise mismatch(name, f"B has shape {list(words.shape)}, not tiles of 64 outputs")
    stored = shaped(need(tensors, "s_channel", name, 2, torch.float32), (1, n), "s_channel", name)
    scales = natural_scales(finite(stored, "s_channel", name), grouped=False)
    grouped = _is_grouped(spec, k)
    codes = natural_codes(words, code_order(grouped)).to(torch.int16)
    values = (codes ^ 8) - 8 if not grouped else codes - 8
    if grouped:
        size = spec.notes["packed_groups"]
        groups = need(tensors, "s_group", name, 2, torch.float16)
        if k % size or groups.shape != (k // size, n):
            raise mismatch(name, f"s_group has shape {list(groups.shape)}, for groups of {size} of {k} inputs")
        factors = natural_scales(finite(groups, "s_group", name), grouped=True).to(torch.float32)
        products = (values * factors.repeat_interleave(size, dim=1)).round_()
        if float(products.max()) > 127 or float(products.min()) < -128:
            raise mismatch(name, "s_group makes codes of more than 8 bits")
        values = products.to(torch.int16)
    elif tensors.get("s_group") is not None and tensors["s_group"].numel():
        raise mismatch(name, "s_group has groups, and the config has none")
    else:
        values = values * 16
    codes8 = (values + 128).to(torch.uint8)
    weight = QWeight(scheme="w8a8", codes=codes8, scales=scales, bias=read_bias(tensors, n, name), group_size=k)
    return with_live_scales(weight, "s_channel", name)
