"""The rows of GGUF tensors as QWeights, or as floats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checks import finite
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.kinds import NUMBERS, Kind
from aiakq.kernels.block_weight import BlockKind, BlockWeight, StoredRows
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight

#: Kinds whose values are stored as they are.
PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
#: Kinds that are always unpacked: ternary ones, whose codes have a zero point.
_UNPACKED = ("TQ1_0", "TQ2_0")
#: Number of values that are decoded at once.
_STEP = 1 << 24


def check_kind(kind: Kind, name: str) -> None:
    """Raise ``gguf_unsupported`` for a kind that is not read; ``name`` is the tensor."""
    if kind.name not in LAYOUTS and kind.name not in PLAIN:
        known = ", ".join(LAYOUTS)
        reason = f"the tensor {name:.200} is stored as {kind.name} (aiakq reads {known})"
        raise error("gguf_unsupported", reason=reason)


def read_weight(rows: Tensor, kind: Kind, name: str, bias: Tensor | None = None) -> QWeight:
    """Return a linear from its blocks [N, bytes of a row] uint8.

    bias  [N] float, or None.

    Raises ``gguf_unsupported`` for a kind that is not read, ``not_finite``.
    """
    check_kind(kind, name)
    layout = LAYOUTS[kind.name]
    n, k = len(rows), rows.shape[1] // kind.nbytes * kind.values
    unpacked = layout.unpack(rows.reshape(-1, kind.nbytes))
    scales = finite(unpacked.scales, "weight", name).view(n, -1)
    offsets = unpacked.offsets
    zeros = None if unpacked.zero is None else torch.full_like(scales, unpacked.zero, dtype=torch.uint8)
    return QWeight(
        scheme="lut4a16" if layout.table else f"w{layout.bits}a16",
        codes=unpacked.codes.view(n, k),
        scales=scales,
        zeros=zeros,
        bias=bias,
        group_size=layout.group_size,
        table=torch.tensor(TABLES[layout.table]) if layout.table else None,
        offsets=None if offsets is None else finite(offsets, "weight", name).view(n, -1),
    )


def read_blocks(rows: Tensor | StoredRows, kind: Kind, name: str, bias: Tensor | None = None) -> QWeight:
    """Return what ``read_weight`` does as a BlockWeight, which is unpacked, or even read, only where that is needed.

    rows  blocks [N, bytes of a row] uint8, or where they are.

    Raises ``gguf_unsupported`` for a kind that is not read; what is wrong with the rows is raised when they are used.
    """
    check_kind(kind, name)
    layout = LAYOUTS[kind.name]
    if kind.name in _UNPACKED:
        return read_weight(rows if isinstance(rows, Tensor) else rows.read(), kind, name, bias)
    known = BlockKind(
        kind.name,
        NUMBERS[kind.name],
        kind.values,
        kind.nbytes,
        scheme="lut4a16" if layout.table else f"w{layout.bits}a16",
        group_size=layout.group_size,
        table=layout.table,
        has_offsets=not layout.symmetric,
    )
    return BlockWeight(rows, known, partial(read_weight, kind=kind, name=name), bias)


def read_floats(rows: Tensor, kind: Kind, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values [N, K] of blocks [N, bytes of a row] uint8, in ``dtype``; None: as stored, or float32.

    Values are computed in float32, by the operations of ggml. Raises what ``read_weight`` raises.
    """
    check_kind(kind, name)
    if kind.name in PLAIN:
        values = rows.contiguous().view(PLAIN[kind.name])
        return values if dtype is None else values.to(dtype)
    k = rows.shape[1] // kind.nbytes * kind.values
    values = torch.empty(len(rows), k, dtype=dtype or torch.float32)
    step = max(1, _STEP // k)
    for start in range(0, len(rows), step):
        values[start : start + step] = values_of(read_weight(rows[start : start + step], kind, name))
    return values


def values_of(weight: QWeight) -> Tensor:
    """Return W [N, K] float32, K a multiple of the group size: codes times scales, then the offsets."""
    groups = weight.codes.view(weight.n, -1, weight.group_size)
    if weight.table is not None:
        codes = weight.table[groups.int()]
    elif weight.offsets is not None:
        codes = groups.float()
    elif weight.zeros is None:
        codes = groups.float() - 2 ** (weight.bits - 1)
    else:
        codes = groups.float() - weight.zeros.float().unsqueeze(2)
    values = codes * weight.scales.float().unsqueeze(2)
    if weight.offsets is not None:
        values += weight.offsets.float().unsqueeze(2)
    return values.view(weight.n, weight.k)
