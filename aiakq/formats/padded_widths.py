"""MLP widths that quantization padded with zeros, so that every server can cut the layers (``-tp``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: Key of config.json -> (the source's width, the output's).
Widths = Mapping[str, tuple[int, int]]
#: Where config.json has them, under ``aiakq``.
KEY = "padded"


def record_widths(widths: Widths) -> dict[str, object]:
    """Return the value that is stored under KEY in config.json for ``widths``."""
    return {key: {"from": old, "to": new} for key, (old, new) in widths.items()}


def read_widths(config: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """The widths that a config.json records."""
    own = config.get("aiakq")
    entries = own.get(KEY) if isinstance(own, dict) else None
    widths: dict[str, tuple[int, int]] = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        old, new = (entry.get("from"), entry.get("to")) if isinstance(entry, dict) else (None, None)
        if type(old) is int and type(new) is int and 0 < old < new:
            widths[key] = old, new
    return widths


def pads_to(have: int, want: int, widths: Widths, name: str) -> tuple[int, int] | None:
    """(parts, size of each part) where a dimension of ``have`` in the tensor or layer ``name`` becomes ``want`` by a
    padding of ``widths``; None where no padding leads there.
    """
    for old, new in widths.values():
        if (have, want) == (old, new):
            return 1, new
        if (have, want) == (2 * old, 2 * new) and "gate_up_proj" in name:
            return 2, new
    return None


def pad(tensor: Tensor, shape: Sequence[int], widths: Widths, name: str = "") -> Tensor:
    """``tensor`` of the source with zeros wherever ``shape`` is wider by a padding of ``widths``.

    A dimension that holds gate and up one after the other is padded at the end of each. The tensor comes back as it is
    where nothing is to be padded, and also where its shape differs from ``shape`` for another reason.
    """
    if tensor.dim() != len(shape):
        return tensor
    for dim, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have == want:
            continue
        pads = pads_to(have, want, widths, name)
        if pads is None:
            return tensor
        parts, size = pads
        tensor = torch.cat([_widened(part, dim, size) for part in tensor.split(have // parts, dim)], dim)
    return tensor


def _widened(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = list(tensor.shape)
    missing[dim] = size - tensor.shape[dim]
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)
