"""Size of the output's tensors, from what the format itself writes for a few rows of each layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache

import torch

from aiakq import formats
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.inventory import FLOATS
from aiakq.formats.safetensors_file import DTYPE_BYTES, TensorInfo
from aiakq.quantizers.block.result import stored_weight
from aiakq.spec import QuantSpec

#: Rows of the two samples, multiples of what every format packs together.
_ROWS = (128, 256)


def linear_bytes(n: int, k: int, spec: QuantSpec, storage: torch.dtype, has_bias: bool = False) -> int:
    """Return the bytes of all tensors of a linear [N, K] in the format of ``spec``.

    storage  dtype of what is not quantized, like biases.
    """
    if spec.blocks is not None:
        return n * KINDS[NUMBERS[spec.blocks]].row_bytes(k) + (n * storage.itemsize if has_bias else 0)
    if n <= _ROWS[1]:
        return _written(n, k, spec, storage, has_bias)
    few, more = (_written(rows, k, spec, storage, has_bias) for rows in _ROWS)
    # A part for each row, and what is there once.
    return few + (more - few) * (n - _ROWS[0]) // (_ROWS[1] - _ROWS[0])


@cache
def _sample(n: int, k: int, spec: tuple[tuple[str, object], ...], storage: torch.dtype, has_bias: bool) -> int:
    own = QuantSpec(**dict(spec))  # type: ignore[arg-type]
    groups = 1 if own.group_size == -1 else -(-k // own.group_size)
    zeros = torch.full((n, groups), 2.0 ** (own.bits - 1))
    weight = stored_weight(
        (torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, groups), zeros),
        own,
        bias=torch.zeros(n) if has_bias else None,
        input_scale=torch.ones(()) if own.static_input else None,
        unit=1.0 if own.scale_type == "e4m3" else None,
    )
    tensors = formats.load(own.format).write(weight, own, storage)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _written(n: int, k: int, spec: QuantSpec, storage: torch.dtype, has_bias: bool) -> int:
    names = ("ignore", "layers", "rotated", "notes")  # say nothing about a single layer
    settings = tuple(
        (name, value) for name, value in vars(spec).items() if name not in names and not name.startswith("_")
    )
    return _sample(n, k, settings, storage, has_bias)


def copied_bytes(inventory: Mapping[str, TensorInfo], left_out: Collection[str], storage: torch.dtype) -> int:
    """Return the bytes of the tensors that are copied, floats as ``storage``: all but those left out."""
    total = 0
    for name, info in inventory.items():
        if name not in left_out:
            total += math.prod(info.shape) * (storage.itemsize if info.dtype in FLOATS else DTYPE_BYTES[info.dtype])
    return total
