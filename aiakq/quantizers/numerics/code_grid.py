"""Grids of codes: which values the codes of a group can stand for.

The GPTQ loop, its sweeps and the refit of scales know a grid only by these operations, so that any code with a scale
per group can be rounded by them: ``value = unit(code, zero) * scale``, where the unit depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aiakq.rounding.integers import codes_for, ranges, scales_for
from aiakq.rounding.ranges import searched_scales


class CodeGrid(Protocol):
    """The codes of a group, for parameters (scale, zero) of that group.

    integer_bits  bits of the codes if they are integers of this many bits, for which there are native loops; else None.
    """

    @property
    def integer_bits(self) -> int | None: ...

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scales and zeros [...] float32 for groups [..., G]: the best for errors weighted by ``cost`` [..., G],
        or without it those of round-to-nearest."""
        ...

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest code of each value, as float; scales and zeros are broadcast."""
        ...

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        """Return the values of codes at scale 1, a new float32 tensor."""
        ...

    def stored(self, scales: Tensor) -> Tensor:
        """Return the nearest scales that can be stored, float32."""
        ...


@dataclass(frozen=True)
class IntegerGrid:
    """Integers with a zero point, ``(code - zero) * scale``; see rounding.py.

    storage   the dtype in which scales are stored.
    searched  whether groups may get less than their full range.
    signed    whether a scale may be negative; see clip.py.
    """

    bits: int
    symmetric: bool
    storage: torch.dtype
    searched: bool = True
    signed: bool = False

    @property
    def integer_bits(self) -> int:
        return self.bits

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.searched and cost is not None:
            return searched_scales(groups, self.bits, self.symmetric, self.storage, cost, self.signed)
        return scales_for(*ranges(groups, self.symmetric), self.bits, self.symmetric, self.storage)

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return codes_for(values, scales, zeros, self.bits)

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        return codes - zeros

    def stored(self, scales: Tensor) -> Tensor:
        return scales.to(self.storage).to(torch.float32)
