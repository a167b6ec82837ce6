"""Blocks from floats, and from QWeights whose numbers they hold exactly; blocks.py takes them apart again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.gguf import rounding
from aiakq.formats.gguf.decoding import PLAIN, read_weight, values_of
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf.rounding import CodeLevels
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight

#: Kinds with a scale for 32 values -> their smallest and largest integer; with a minimum besides -> the largest code.
SYMMETRIC = {"Q8_0": (-128, 127), "Q4_0": (-8, 7), "Q5_0": (-16, 15)}
AFFINE = {"Q4_1": 15, "Q5_1": 31}
#: Kinds with both in blocks of 256 -> the largest code.
SUPER_AFFINE = {"Q4_K": 15, "Q5_K": 31}
_IQ4 = CodeLevels.of_table(TABLES["iq4_nl"])
#: Values that are rounded at once: few enough that all of a search stays in a processor's cache.
_STEP = 1 << 18
#: From values [B, V] float32, and the weights of their squared errors [B, V] or None, to blocks [B, bytes].
Encoder = Callable[[Tensor, Tensor | None], Tensor]


def encode(values: Tensor, kind: str, name: str = "tensor", importance: Tensor | None = None) -> Tensor:
    """Return the blocks [N, bytes of a row] uint8 of floats [N, K], rounded to the nearest values of a kind.

    kind        F32, F16, BF16 or a key of ENCODERS; K is a multiple of the values of a block.
    importance  [K] positive: by how much errors of the weights of an input count, like the mean of its squares or the
                diagonal of the Hessian of calibration; None: all alike.

    Raises ``not_finite`` for NaN, infinity, and what exceeds float16.
    """
    values = values.detach().cpu()
    if kind in PLAIN:
        stored = values.to(PLAIN[kind]).contiguous()
        _check_finite(stored, name)
        return stored.view(torch.uint8)
    block = KINDS[NUMBERS[kind]]
    _check_finite(values, name, torch.finfo(torch.float16).max)
    assert values.shape[1] % block.values == 0, f"{values.shape[1]} inputs are no whole blocks of {kind}"
    rows = []
    step = max(1, _STEP // values.shape[1])
    for part in values.split(step):
        weights = None if importance is None else importance.float().expand(part.shape).reshape(-1, block.values)
        rows.append(ENCODERS[kind](part.float().reshape(-1, block.values), weights).view(len(part), -1))
    return torch.cat(rows)


def _check_finite(values: Tensor, name: str, largest: float = math.inf) -> None:
    if not bool((values.float().abs() <= min(largest, torch.finfo(torch.float32).max)).all()):
        hint = "Weights must be finite, and blocks with scales in float16 hold none above 65504."
        raise error("not_finite", what=name, hint=hint)


def exact_blocks(weight: QWeight) -> tuple[str, Tensor] | None:
    """Return the kind and the blocks [N, bytes of a row] with exactly the values of a quantized linear, or None.

    4, 5 and 8 bits with scales that float16 holds, in groups of a multiple of 32 inputs, without a permutation.
    """
    if weight.perm is not None or weight.rotated or weight.factors is not None:
        return None
    if weight.table is not None or weight.code_type is not None:
        return None
    if weight.input_scale is not None or weight.k % 32 or (weight.group_size % 32 and weight.group_size != weight.k):
        return None
    affine = weight.zeros is not None or weight.offsets is not None
    kind = {(4, False): "Q4_0", (4, True): "Q4_1", (5, False): "Q5_0", (5, True): "Q5_1", (8, False): "Q8_0"}.get(
        (weight.bits, affine)
    )
    if kind is None:
        return None
    rows = nearest_offsets(weight, kind)
    if rows is None:
        return None
    decoded = values_of(read_weight(rows, KINDS[NUMBERS[kind]], "linear"))
    return (kind, rows) if torch.equal(decoded, values_of(weight)) else None


def nearest_offsets(weight: QWeight, kind: str) -> Tensor | None:
    """Return the blocks [N, bytes of a row] with the codes of a linear and its scales and minima rounded to float16, or
    None if these are not finite, or vanish.

    weight  of the bits of ``kind``, in groups of a multiple of 32 inputs, without a permutation.
    """
    scales = _each_32(weight.scales.float(), weight)
    offsets = None
    if weight.offsets is not None:
        offsets = _each_32(weight.offsets.float(), weight)
    elif weight.zeros is not None:
        offsets = -_each_32(weight.zeros.float(), weight) * scales
    d, m = scales.half(), None if offsets is None else offsets.half()
    if not bool(torch.isfinite(d).all() and (m is None or torch.isfinite(m).all())) or bool(
        ((d == 0) != (scales == 0)).any()
    ):
        return None
    return pack_block(kind, weight.codes.reshape(-1, 32), d, m).view(weight.n, -1)


def _each_32(values: Tensor, weight: QWeight) -> Tensor:
    """Return values per group as values per 32 inputs [N * K / 32, 1]."""
    repeated = values.repeat_interleave(-(-weight.group_size // 32), dim=1)[:, : weight.k // 32]
    return repeated.reshape(-1, 1)


# --- packing ----------------------------------------------------------------------------------------------------------


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _packed(codes: Tensor, bits: int, run: int) -> Tensor:
    """Return bytes with 8 / ``bits`` codes each, the inverse of ``blocks._fields``."""
    parts = codes.to(torch.uint8).reshape(len(codes), -1, 8 // bits, run)
    packed = torch.zeros_like(parts[:, :, 0])
    for index in range(8 // bits):
        packed |= parts[:, :, index] << (index * bits)
    return packed.flatten(1)


def pack_block(kind: str, codes: Tensor, d: Tensor, m: Tensor | None = None) -> Tensor:
    """Return blocks of 32: codes [B, 32] from 0 on, d and m [B, 1] float16."""
    fields = [_bytes(d)] + ([] if m is None else [_bytes(m)])
    codes = codes.to(torch.uint8)
    if kind == "Q8_0":
        return torch.cat([*fields, codes ^ 0x80], dim=1)
    if kind in ("Q5_0", "Q5_1"):
        fields.append(_packed(codes >> 4, 1, 1))
    return torch.cat([*fields, _packed(codes & 15, 4, 16)], dim=1)


def _columns(values: Tensor, importance: Tensor | None, size: int) -> rounding.Groups:
    """Return values [B, V] as groups [size, B * V / size]."""
    weights = None if importance is None else importance.reshape(-1, size).T.contiguous()
    return rounding.Groups(values.reshape(-1, size).T.contiguous(), weights)


def _symmetric(kind: str, low: int, high: int) -> Encoder:
    def encoder(values: Tensor, importance: Tensor | None) -> Tensor:
        groups, levels = _columns(values, importance, 32), CodeLevels(low, high)
        d = rounding.half(rounding.symmetric_scales(groups, levels))
        codes = groups.codes(d, None, levels).T + 2 ** (high.bit_length())
        return pack_block(kind, codes, d.half().unsqueeze(1))

    return encoder


def _affine(kind: str, high: int) -> Encoder:
    def encoder(values: Tensor, importance: Tensor | None) -> Tensor:
        groups = _columns(values, importance, 32)
        scales, minima = rounding.affine_scales(groups, high, nonnegative=False)
        d, m = rounding.half(scales), rounding.half(-minima)
        return pack_block(kind, groups.codes(d, -m, CodeLevels(0, high)).T, d.half()[:, None], m.half()[:, None])

    return encoder


def _super_affine(high: int) -> Encoder:
    """Return the encoder of Q4_K and Q5_K, with codes up to ``high``."""

    def encoder(values: Tensor, importance: Tensor | None) -> Tensor:
        groups = _columns(values, importance, 32)
        *found, columns = rounding.super_affine(groups, 8, high, 63)
        return pack_super_affine(columns.T.reshape(-1, 256), *found, high=high)

    return encoder


def pack_super_affine(codes: Tensor, d: Tensor, dmin: Tensor, scales: Tensor, minima: Tensor, *, high: int) -> Tensor:
    """Return blocks of Q4_K or Q5_K, whose codes [B, 256] go up to ``high``; d and dmin [B], integers [B, 8]."""
    codes = codes.to(torch.uint8)
    low, high_bits = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = torch.cat(
        [
            low[:, :4] | ((low[:, 4:] >> 4) << 6),
            high_bits[:, :4] | ((high_bits[:, 4:] >> 4) << 6),
            (low[:, 4:] & 15) | ((high_bits[:, 4:] & 15) << 4),
        ],
        dim=1,
    )
    fields = [_bytes(d.half()[:, None]), _bytes(dmin.half()[:, None]), packed]
    if high > 15:
        fields.append(_packed(codes >> 4, 1, 32))
    return torch.cat([*fields, _packed(codes & 15, 4, 32)], dim=1)


def _q6_k(values: Tensor, importance: Tensor | None) -> Tensor:
    groups = _columns(values, importance, 16)
    d, scales, columns = rounding.super_symmetric(groups, 16, CodeLevels(-32, 31), (-128, 127))
    return pack_q6_k(columns.T.reshape(len(d), 256) + 32, d, scales)


def pack_q6_k(codes: Tensor, d: Tensor, scales: Tensor) -> Tensor:
    """Return blocks of Q6_K: codes [B, 256] from 0 to 63, d [B], integers [B, 16]."""
    codes = codes.to(torch.uint8)
    fields = [_packed(codes & 15, 4, 64), _packed(codes >> 4, 2, 32), _bytes(scales.to(torch.int8))]
    return torch.cat([*fields, _bytes(d.half()[:, None])], dim=1)


def _q3_k(values: Tensor, importance: Tensor | None) -> Tensor:
    groups = _columns(values, importance, 16)
    d, integers, columns = rounding.super_symmetric(groups, 16, CodeLevels(-4, 3), (-32, 31))
    codes = (columns.T + 4).to(torch.uint8).reshape(len(d), 256)
    scales = (integers + 32).to(torch.uint8)
    packed = [_packed(scales & 15, 4, 8), _packed(scales >> 4, 2, 4)]
    return torch.cat([_packed(codes >> 2, 1, 32), _packed(codes & 3, 2, 32), *packed, _bytes(d.half()[:, None])], dim=1)


def _q2_k(values: Tensor, importance: Tensor | None) -> Tensor:
    groups = _columns(values, importance, 16)
    d, dmin, scales, minima, columns = rounding.super_affine(groups, 16, 3, 15)
    codes = columns.T.to(torch.uint8).reshape(len(d), 256)
    both = scales.to(torch.uint8) | (minima.to(torch.uint8) << 4)
    return torch.cat([both, _packed(codes, 2, 32), _bytes(d.half()[:, None]), _bytes(dmin.half()[:, None])], dim=1)


def _iq4_nl(values: Tensor, importance: Tensor | None) -> Tensor:
    groups = _columns(values, importance, 32)
    d = rounding.half(rounding.symmetric_scales(groups, _IQ4))
    codes = _IQ4.indices(groups.codes(d, None, _IQ4))
    return pack_block("IQ4_NL", codes.T, d.half()[:, None])


def _iq4_xs(values: Tensor, importance: Tensor | None) -> Tensor:
    groups = _columns(values, importance, 32)
    d, integers, columns = rounding.super_symmetric(groups, 8, _IQ4, (-32, 31))
    codes = _IQ4.indices(columns).T.reshape(len(d), 256)
    scales = (integers + 32).to(torch.uint8)
    packed = [_packed(scales >> 4, 2, 1), _packed(scales & 15, 4, 1)]
    return torch.cat([_bytes(d.half()[:, None]), *packed, _packed(codes, 4, 16)], dim=1)


#: Name of a kind -> function from values [B, V] float32, and their importance, to blocks [B, bytes].
ENCODERS: Mapping[str, Encoder] = {
    **{kind: _symmetric(kind, *codes) for kind, codes in SYMMETRIC.items()},
    **{kind: _affine(kind, high) for kind, high in AFFINE.items()},
    **{kind: _super_affine(high) for kind, high in SUPER_AFFINE.items()},
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
