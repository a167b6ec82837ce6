"""Rounds the linears of a block to small floats, whose scales have numbers in common that are chosen before.

NVFP4 has a number by which all scales of a linear are divided, FP8 may have one scale for a linear or for blocks of it.
Linears that servers join into one share these numbers, as llm-compressor makes them do: vLLM knows one for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from aiakq.kernels.ops.block_floats import LARGEST
from aiakq.quantizers.model.groups import FUSED
from aiakq.quantizers.numerics.code_grid import CodeGrid
from aiakq.quantizers.numerics.float_grids import grid_of, round_on_grid
from aiakq.rounding.integers import Rounding
from aiakq.spec import LayerSpec, QuantSpec

_TINY = torch.finfo(torch.float32).tiny


class FloatRounding:
    """The scales of a block's linears that are stored as floats, by name inside the block.

    They are computed from all weights of the block when the first is needed, which must be before any is rounded.
    ``groups`` share an input.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Linear],
        specs: Mapping[str, QuantSpec],
        groups: Iterable[tuple[str, ...]],
    ) -> None:
        self._linears, self._specs, self._groups = linears, specs, list(groups)
        self._units: dict[str, float] = {}
        self._fixed: dict[str, Tensor] = {}
        self._is_ready = False

    def clear(self) -> None:
        """Forget all scales, after the weights were restored."""
        self._units.clear()
        self._fixed.clear()
        self._is_ready = False

    def unit(self, name: str) -> float | None:
        """Return what the scales of a linear in e4m3 are divided by; None if it has none."""
        self.prepare()
        return self._units.get(name)

    def fixed(self, name: str) -> Tensor | None:
        """Return the scales [N, K / G] of a linear whose outputs share them; None if each output has its own."""
        self.prepare()
        return self._fixed.get(name)

    def grid(self, name: str, storage: torch.dtype, searched: bool, signed: bool = False) -> CodeGrid:
        """Return the grid of the codes of a linear, of integers, too; see ``grid_of``."""
        return grid_of(self._specs[name], storage, searched, signed, self.unit(name))

    def round(self, name: str, weight: Tensor, searched: bool) -> Rounding:
        """Round ``weight`` [N, K] float32 to nearest, with ranges searched by its own error or full ones."""
        grid = self.grid(name, torch.float32, searched)
        return round_on_grid(weight, grid, self._specs[name].group_size, self.fixed(name))

    def prepare(self) -> None:
        """Compute the scales, if they are not known yet."""
        if self._is_ready:
            return
        self._is_ready = True
        for names in self._joined():
            spec = self._specs[names[0]]
            by_tensor = spec.float8 is not None and spec.float8.rows == -1
            if spec.scale_type != "e4m3" and not by_tensor:
                continue
            highest = torch.stack([self._weight(name).abs().amax() for name in names]).amax().clamp(min=_TINY)
            for name in names:
                if by_tensor:
                    n = self._linears[name].out_features
                    self._fixed[name] = (highest / LARGEST["e4m3"]).expand(n, 1).contiguous()
                else:
                    unit = LARGEST["e4m3"] * LARGEST["e2m1"] / highest
                    self._units[name] = float(unit.clamp(max=torch.finfo(torch.float32).max))
        for name, spec in self._specs.items():
            if spec.float8 is not None and spec.float8.rows > 1:
                self._fixed[name] = _block_scales(self._weight(name), spec.float8.rows, spec.group_size)

    def _weight(self, name: str) -> Tensor:
        return self._linears[name].weight.data

    def _joined(self) -> list[list[str]]:
        """Return all linears, in sets that share their numbers: those of equal scheme that share an input or that
        servers join."""
        number = {name: index for index, name in enumerate(self._linears)}
        families = dict[tuple[str, int], list[str]]()
        for name in self._linears:
            parent, _, last = name.rpartition(".")
            for index, parts in enumerate(FUSED):
                if last in parts:
                    families.setdefault((parent, index), []).append(name)
        for group in [*self._groups, *families.values()]:
            alike: dict[LayerSpec, set[int]] = {}
            for name in group:
                if name in number:
                    alike.setdefault(self._specs[name].layer, set()).add(number[name])
            for merged in alike.values():
                if len(merged) > 1:
                    number = {name: min(merged) if each in merged else each for name, each in number.items()}
        sets: dict[int, list[str]] = {}
        for name, index in number.items():
            sets.setdefault(index, []).append(name)
        return list(sets.values())


def _block_scales(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scale of every output and group of inputs, [N, K / G], equal inside blocks of rows x columns."""
    n = len(weight)
    highest = weight.abs().unflatten(1, (-1, columns)).amax(-1)
    padded = nn.functional.pad(highest, (0, 0, 0, -n % rows)).unflatten(0, (-1, rows)).amax(1)
    scales = torch.where(padded == 0, torch.ones_like(padded), padded / LARGEST["e4m3"]).clamp(min=_TINY)
    return scales.repeat_interleave(rows, 0)[:n].contiguous()
