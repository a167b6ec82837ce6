"""Reads a new GGUF file as a server would and compares every tensor with that of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.convert.gguf.source import GGUFSource
from aiakq.convert.report import LayerConversion
from aiakq.errors import error
from aiakq.formats.gguf.decoding import read_floats
from aiakq.formats.gguf.encoding import ENCODERS
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf_model.tensors import BlockInfo, ModelTensors

#: Largest relative error of a tensor that rounding may cause: a larger one means that something else is wrong.
_LARGEST_ERROR = 0.5


def check_file(
    path: Path,
    source: GGUFSource,
    kinds: Mapping[str, str],
    config: Mapping[str, Any],
    progress: Callable[[str, int, int, str], None],
) -> list[LayerConversion]:
    """Return how far every matrix of a file, and every other tensor that was rounded, is from the checkpoint's.

    kinds   tensor of the file -> its kind.
    config  config.json that the reader makes of its keys.

    Raises ``not_as_written``.
    """
    file, found = GGUFFile.open(path), []
    try:
        tensors = ModelTensors.of(file, config)
        wanted = {part.name: kinds[name] for name, each in source.tensors.items() for part in each.parts}
        for name in sorted(wanted.keys() ^ tensors.inventory.keys()):
            raise error("not_as_written", layer=name)
        for number, name in enumerate(sorted(wanted)):
            progress("check", number, len(wanted), name)
            if entry := _compared(source, name, wanted[name], _floats(tensors, name)):
                found.append(entry)
    finally:
        file.close()
    return found


def _floats(tensors: ModelTensors, name: str) -> Tensor:
    """Return a tensor of a file in float32, decoded if it is packed."""
    info, value = tensors.inventory[name], tensors.read(name)
    return read_floats(value, KINDS[NUMBERS[info.dtype]], name) if isinstance(info, BlockInfo) else value.float()


def _compared(source: GGUFSource, name: str, kind: str, found: Tensor) -> LayerConversion | None:
    values = source.dense(name).float()
    if found.shape != values.shape:
        raise error("not_as_written", layer=name)
    change, relative, largest = source.changes.get(name, ""), 0.0, 0.0
    if not torch.equal(found, values):
        gap = (found - values).double()
        norm = float(values.double().square().sum())
        relative = (float(gap.square().sum()) / norm) ** 0.5 if norm else float("inf")
        largest = float(gap.abs().max())
    linear = source.linears.get(name)
    exact = linear is not None and not change and kind in ENCODERS
    if not relative <= _LARGEST_ERROR or (exact and largest):
        raise error("not_as_written", layer=name)
    if values.dim() < 2 and not largest:
        return None
    change = change or (f"rounded to {kind}" if largest else "")
    before = source.own_kind(name) if linear is None else source.checkpoint.linear_spec(linear.name).describe()
    n, k = values.shape[0], values.numel() // values.shape[0]
    return LayerConversion(name.removesuffix(".weight"), n, k, before, kind, relative, largest, change)
