"""Rounders for the blocks of GGUF files: the loop of GPTQ with the scales of blocks, and the nearest codes.

A block of 256 inputs has a scale in float16, and small integers for its parts. The loop of numerics/gptq.py chooses all
of them when it reaches the block, by the cost of errors after compensation, and keeps them in the sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.constraints import declare
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.encoding import encode
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.numerics.block_grid import BlockGrid
from aiakq.quantizers.numerics.gptq import GptqSettings, GptqSolver
from aiakq.quantizers.recipe import Recipe, Rounder
from aiakq.quantizers.rounders.gptq import Gptq, MatrixOfLinears
from aiakq.quantizers.workers.protocol import Task, Value
from aiakq.spec import LayerSpec

_NOT_BLOCKS = "it rounds to the blocks of GGUF files (-quant_type gguf)"


@dataclass(frozen=True)
class GptqBlocks(Gptq):
    """GPTQ to blocks; the parameters are those of Gptq. Scales are not refitted."""

    name = "gptq_blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(not self.refit, "refit", "false: scales of blocks are not refitted")
        self.require(
            not self.weighs_rows, "importance", "gradient or none: blocks are rounded without feedback along rows"
        )
        self.require(
            self.act_order != "static", "act_order", "group or none: a block has inputs that follow each other"
        )

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        return _NOT_BLOCKS if scheme.blocks is None else None

    def _solver(self, matrix: MatrixOfLinears) -> GptqSolver:
        kind = matrix.spec.blocks
        assert kind is not None
        layout, values = LAYOUTS[kind], KINDS[NUMBERS[kind]].values
        settings = GptqSettings(
            BlockGrid(kind, layout.bits),
            values,
            self.act_order,
            self.damp,
            sweeps=self.sweeps,
            scales_per_group=values // layout.group_size,
        )
        return GptqSolver(matrix.moments.hessian, settings, matrix.moments.drift)

    def _rounded(self, solver: GptqSolver, matrix: MatrixOfLinears, rows: range) -> list[Value]:
        """Return the rows of blocks of some rows, and the damping."""
        grid, kind = solver.settings.grid, matrix.spec.blocks
        assert isinstance(grid, BlockGrid) and kind is not None
        if solver.damp is None:
            return [encode(torch.cat(matrix.weights(rows)), kind, matrix.names[0]), None]
        grid.found.clear()
        result = solver.round(matrix.weights(rows), matrix.shift(rows))
        order = (solver.order[:: solver.group_size] // solver.group_size).tolist()
        return [grid.pack(result.codes, order), result.damp]

    def _finish_tasks(self, block: DecoderBlock, names: tuple[str, ...], results: Sequence[list[Value]]) -> None:
        rows = torch.cat([value for value, _ in results if isinstance(value, Tensor)])
        sizes = [block.linears[name].out_features for name in names]
        for name, part in zip(names, rows.split(sizes), strict=True):
            block.finish_blocks(name, part.clone())

    def _finish_nearest(self, block: DecoderBlock, name: str) -> None:
        block.finish_blocks(name, nearest_blocks(block, name, None))


@dataclass(frozen=True)
class NearestBlocks(Rounder):
    """Round to the nearest codes of blocks, whose scales are searched by the squared error of their weights.

    importance  ``inputs`` weighs errors by the mean square of each input on the calibration tokens, as llama-quantize
                does with an importance matrix; ``none`` all alike.
    """

    importance: str = declare("none", choices=("none", "inputs"))

    name = "nearest_blocks"
    by_parts = True

    @property
    def needs_inputs(self) -> bool:  # type: ignore[override]
        return self.importance == "inputs"

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        return _NOT_BLOCKS if scheme.blocks is None else None

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        squares = self._mean_squares(block, part) if self.needs_inputs else {}
        tasks = []
        for name in part.linears:

            def run(name: str = name) -> list[Value]:
                return [nearest_blocks(block, name, squares.get(name))]

            tasks.append(Task(block.weight(name).numel(), run))
        for name, (rows,) in zip(part.linears, block.workers.share(tasks), strict=True):
            assert isinstance(rows, Tensor)
            block.finish_blocks(name, rows)

    def _mean_squares(self, block: DecoderBlock, part: BlockPart) -> dict[str, Tensor]:
        """Return the mean square [K] of the inputs of each linear that has calibration tokens."""

        def statistic(name: str) -> Statistic:
            def add(totals: list[Tensor], rows: Tensor, batch: int) -> None:
                totals[0] += rows.square().sum(0)

            weight = block.weight(name)
            return Statistic(lambda: [torch.zeros(weight.shape[1], device=weight.device)], add)

        if not part.groups:
            return {}
        gathered = block.inputs.gather({group[0]: statistic(group[0]) for group in part.groups})
        return {name: gathered[group[0]][1][0] / gathered[group[0]][0] for group in part.groups for name in group}


def nearest_blocks(block: DecoderBlock, name: str, importance: Tensor | None) -> Tensor:
    """Return a linear as rows of blocks [N, bytes of a row], every weight rounded to nearest."""
    kind = block.spec(name).blocks
    assert kind is not None
    if importance is not None:
        # An input that is never active must not make its block's scales arbitrary.
        importance = importance.clamp(min=1e-4 * float(importance.mean()) or 1.0)
    return encode(block.weight(name), kind, name, importance)
