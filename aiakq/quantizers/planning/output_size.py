"""Size of the output's tensors, from what the format itself writes for a few rows of each layer."""

from __future__ import annotations

from functools import cache

import torch

from aiakq import formats
from aiakq.quantizers.block.result import stored_weight
from aiakq.spec import QuantSpec

#: Rows of the two samples, multiples of what every format packs together.
_ROWS = (128, 256)


def linear_bytes(n: int, k: int, spec: QuantSpec, storage: torch.dtype, has_bias: bool = False) -> int:
    """Return the bytes of all tensors of a linear [N, K] in the format of ``spec``.

    storage  dtype of what is not quantized, like biases.
    """
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
