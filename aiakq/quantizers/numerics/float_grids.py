"""Grids of codes that are small floats: e4m3 (FP8), and e2m1 with scales in e8m0 (MXFP4) or in e4m3 (NVFP4).

Scales of full ranges are those of compressed-tensors. The search tries the scales beside them that the files can hold:
a float's error depends on where in its binade the largest weight of a group comes to lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aiakq.kernels.ops.block_floats import EXPONENT, LARGEST, power_of_two, round_e2m1
from aiakq.kernels.tables import TABLES
from aiakq.quantizers.numerics.code_grid import CodeGrid, IntegerGrid
from aiakq.rounding.integers import Rounding, grouped, rows_at_once
from aiakq.spec import QuantSpec

#: Steps from the scale of the full range that the search tries: numbers of e4m3, powers of two, eighths of a binade.
_E4M3_STEPS = (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5)
_E8M0_STEPS = (0, -1, 1)
_EIGHTHS = tuple(range(8))
#: The bits of the largest number of e4m3.
_TOP = 0x7E


def grid_of(
    spec: QuantSpec, storage: torch.dtype, searched: bool, signed: bool = False, unit: float | None = None
) -> CodeGrid:
    """Return the grid of the codes of a linear stored as in ``spec``.

    storage   dtype of the scales of integers.
    searched  whether groups may get other ranges than their full ones.
    signed    whether scales of integers may be negative.
    unit      what scales in e4m3 are divided by.
    """
    if spec.float8 is not None:
        return Float8Grid(searched)
    if spec.table is not None:
        return Float4Grid(unit if spec.scale_type == "e4m3" else None, searched)
    return IntegerGrid(spec.bits, spec.symmetric, storage, searched=searched, signed=signed)


def round_on_grid(weight: Tensor, grid: CodeGrid, group_size: int, scales: Tensor | None = None) -> Rounding:
    """Round every weight [N, K] float32 to the nearest code of its group.

    ``scales`` [N, K / G] are given, or searched by the squared error of the weights if the grid searches. Returns codes
    [N, K] uint8, scales and zeros [N, K / G] float32.
    """
    groups = grouped(weight, group_size)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    found = torch.empty(groups.shape[:2], device=weight.device) if scales is None else scales
    zeros, ones = torch.zeros_like(found), torch.ones(groups.shape[-1], device=weight.device)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        if scales is None:
            found[rows], zeros[rows] = grid.search(groups[rows], ones)
        codes[rows] = grid.codes(groups[rows], found[rows].unsqueeze(-1), zeros[rows].unsqueeze(-1)).flatten(1)
    return codes, found, zeros


@dataclass(frozen=True)
class Float8Grid:
    """e4m3 with a scale in float32."""

    searched: bool = False

    integer_bits: ClassVar[None] = None

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        highest = groups.abs().amax(-1) / LARGEST["e4m3"]
        full = torch.where(highest == 0, torch.ones_like(highest), highest).clamp(min=torch.finfo(torch.float32).tiny)
        steps = _EIGHTHS if self.searched and cost is not None else _EIGHTHS[:1]
        return _best(self, groups, cost, [full * 2 ** (step / 8) for step in steps])

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        top = LARGEST["e4m3"]
        return (values / scales).clamp_(-top, top).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.float32)

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)

    def stored(self, scales: Tensor) -> Tensor:
        return scales.to(torch.float32)


@dataclass(frozen=True)
class Float4Grid:
    """e2m1 with scales that are e4m3 numbers divided by ``unit``, or without one powers of two."""

    unit: float | None = None
    searched: bool = False

    integer_bits: ClassVar[None] = None

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        highest = groups.abs().amax(-1)
        if self.unit is None:
            # Rounded up from 1.75 times a power of two, as compressed-tensors does.
            full = ((highest.contiguous().view(torch.int32) + (1 << 21)) >> 23) - EXPONENT["e2m1"]
        else:
            full = self._bits(highest / LARGEST["e2m1"])
        steps = _E8M0_STEPS if self.unit is None else _E4M3_STEPS
        chosen = steps if self.searched and cost is not None else steps[:1]
        return _best(self, groups, cost, [self._scales(full + step) for step in chosen])

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        scaled = values / scales
        size = round_e2m1(scaled.abs().clamp_(max=LARGEST["e2m1"]))
        index = torch.where(size <= 2, 2 * size, torch.where(size <= 4, size + 2, 7.0))
        return index.add_(torch.signbit(scaled), alpha=8)

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        table = torch.tensor(TABLES["e2m1"], dtype=torch.float32, device=codes.device)
        found: Tensor = table[codes.long()]
        return found

    def stored(self, scales: Tensor) -> Tensor:
        if self.unit is not None:
            return self._scales(self._bits(scales))
        fractions, exponents = torch.frexp(scales)
        # The nearer of the powers below and above: 2**(e - 1) and 2**e.
        return self._scales(exponents + torch.where(fractions < 0.75, 126, 127))

    def _bits(self, scales: Tensor) -> Tensor:
        """Return the bits int32 of the nearest e4m3 numbers, at least the smallest above 0."""
        assert self.unit is not None
        wanted = (scales * torch.tensor(self.unit, device=scales.device)).clamp(0, LARGEST["e4m3"])
        return wanted.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32).clamp_(min=1)

    def _scales(self, bits: Tensor) -> Tensor:
        """Return the scales float32 of bits [...] int32, moved into the range of what can be stored."""
        if self.unit is None:
            return power_of_two(bits.to(torch.int32).clamp(0, 254))
        numbers = bits.clamp(1, _TOP).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        return numbers / torch.tensor(self.unit, device=bits.device)


def _best(grid: CodeGrid, groups: Tensor, cost: Tensor | None, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the scales [...] of least error of groups [..., G] with costs, and zeros; the first wins ties."""
    best = candidates[0]
    zeros = torch.zeros_like(best)
    if len(candidates) == 1:
        return best, zeros
    lowest: Tensor | None = None
    for scales in candidates:
        wide = scales.unsqueeze(-1)
        gap = grid.units(grid.codes(groups, wide, zeros.unsqueeze(-1)), zeros).mul_(wide).sub_(groups).square_()
        loss = (gap if cost is None else gap.mul_(cost)).sum(-1)
        if lowest is not None:
            better = loss < lowest
            best, loss = torch.where(better, scales, best), torch.where(better, loss, lowest)
        lowest = loss
    return best, zeros
