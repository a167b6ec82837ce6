"""GPTQ: rounds one input column at a time and compensates the error in the columns that follow.

Frantar et al. 2022 (arXiv:2210.17323), algorithm 1, with lazy batched updates. Quantization inside a decoder block is
truly sequential: query, key and value first, then the attention output, then gate and up, then down, each calibrated on
inputs that already passed through the layers rounded before. The loop itself is in numerics/gptq.py.

With ``targets: original`` each layer makes up for the errors of its inputs and of the residual stream as well, by
steering towards the outputs of the unquantized model (targets.py). ``targets: own`` with ``scale_search: minmax``,
``sweeps: 0`` and ``act_order: none`` is the published algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aiakq.constraints import declare
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.model.experts import expert_pattern
from aiakq.quantizers.numerics.code_grid import CodeGrid
from aiakq.quantizers.numerics.gptq import GptqSettings, GptqSolver
from aiakq.quantizers.numerics.row_feedback import round_with_rows
from aiakq.quantizers.recipe import Recipe, Rounder, like_option
from aiakq.quantizers.rounders.targets import Moments, OriginalTargets, runs
from aiakq.quantizers.workers.protocol import SHARDS, Task, Value
from aiakq.spec import LayerSpec

#: The largest alpha and beta for cross moments of few tokens, whose errors limit what is gained.
_MOST_OF_FEW = 0.5
#: Minimum rows per task: factoring the Hessian again on another worker takes as long as rounding a few hundred rows.
_FEWEST_ROWS = 256
#: Maximum weights per task on a GPU, where the launches of one task take as long as those of another with more rows.
_MOST_ON_GPU = 2**27
#: A group of linears that share an input -> the moments of the input.
_MomentsOf = Callable[[tuple[str, ...]], Moments]


@dataclass(frozen=True)
class Gptq(Rounder):
    """GPTQ.

    act_order     ``static`` orders columns by importance, ``group`` inside and between groups, ``none`` not at all;
                  the order is not recorded in the checkpoint.
    damp          damping added to the Hessian, as a fraction of its mean diagonal.
    sweeps        number of sweeps over all columns after they are rounded; 0 as published. Four gain little more than
                  two.
    scale_search  ``minmax`` uses the full range of a group, ``mse`` also smaller ones, by the loss of its columns.
    targets       what the outputs should be near to: ``original``, those of the unquantized model, or ``own``, those of
                  the unrounded weights on the same inputs.
    alpha, beta   which part of the errors of the inputs, and of the residual stream, ``original`` makes up for.
    original_tokens   calibration tokens per input of the widest linear for which ``original`` runs the unquantized
                  model; 0: all of them.
    enough_tokens  tokens per input, like these, below which alpha and beta are at most 0.5.
    signed        whether symmetric scales of at most 4 bits may be negative; None: with the targets ``original``.
    refit         whether scales are fitted again to the codes, in and after the sweeps; None: likewise, below 8 bits.
    importance    ``gradient`` weights calibration tokens by the gradients of the original model, ``gradient-rows``
                  outputs (numerics/row_feedback.py), ``none`` equally.
    """

    act_order: str = like_option("group", "act_order")
    damp: float = like_option(0.01, "damp")
    sweeps: int = like_option(2, "sweeps")
    scale_search: str = like_option("mse", "scale_search")
    targets: str = like_option("original", "targets")
    alpha: float = declare(0.5, low=0.0, high=1.0, expected="between 0 and 1")
    beta: float = declare(0.5, low=0.0, high=1.0, expected="between 0 and 1")
    original_tokens: int = declare(Rounder.original_tokens, low=0, expected="a whole number from 0 on")
    enough_tokens: int = declare(0, low=0, expected="a whole number from 0 on")
    signed: bool | None = None
    refit: bool | None = None
    importance: str = like_option("none", "importance")

    name = "gptq"
    bits = (4, 8, 3, 2)

    @property
    def needs_original(self) -> bool:  # type: ignore[override]
        return self.targets == "original" and bool(self.alpha or self.beta)

    @property
    def weighs_tokens(self) -> bool:
        return self.importance == "gradient"

    @property
    def weighs_rows(self) -> bool:
        return self.importance == "gradient-rows"

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        if self.weighs_rows and scheme.is_float:
            return "importance gradient-rows is for integer codes; floats have importance gradient"
        if self.weighs_rows and recipe.folds:
            return "importance gradient-rows needs the outputs of the original model, which folded scales change"
        return None

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        moments_of = self._moments_of(block)
        signed = self._with_original(self.signed) and self.scale_search == "mse"
        for run in runs(part.groups):
            matrices = []
            for group in run:
                moments = moments_of(group)
                matrices += [
                    MatrixOfLinears(block, names, group, moments, signed) for names in self._together(block, group)
                ]
                del moments
            self._round(block, matrices)
            del matrices
        for name in part.linears:
            if name not in block.result.finished:
                self._finish_nearest(block, name)

    def _together(self, block: DecoderBlock, group: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Split a group into linears that are rounded together: of one scheme; single ones if each has a factor."""
        return [(name,) for name in group] if self.weighs_rows else block.same_scheme(group)

    def _finish_nearest(self, block: DecoderBlock, name: str) -> None:
        """Submit a linear without calibration tokens."""
        block.finish(name, block.rtn(name))

    def _moments_of(self, block: DecoderBlock) -> _MomentsOf:
        if block.original is not None and self.needs_original:
            most = 1.0 if block.original.tokens_per_input >= self.enough_tokens else _MOST_OF_FEW
            return OriginalTargets(block, min(self.alpha, most), min(self.beta, most)).moments
        return lambda group: Moments(block.inputs.hessians([group[0]], keep=True)[group[0]])

    def _with_original(self, value: bool | None) -> bool:
        """Return the value of a parameter whose default depends on the targets."""
        return self.targets == "original" if value is None else value

    def _round(self, block: DecoderBlock, matrices: Sequence[MatrixOfLinears]) -> None:
        """Round independent matrices, split into tasks for the workers."""
        tasks, of_matrix, solvers = [], [], dict[object, GptqSolver]()
        for number, matrix in enumerate(matrices):
            for rows in matrix.cuts():
                of_matrix.append(number)
                tasks.append(
                    Task(len(rows) * len(matrix.moments.hessian), partial(self._round_rows, solvers, matrix, rows))
                )
        by_matrix: list[list[list[Value]]] = [[] for _ in matrices]
        for number, values in zip(of_matrix, block.workers.share(tasks), strict=True):
            by_matrix[number].append(values)
        del tasks
        for matrix, results in zip(matrices, by_matrix, strict=True):
            self._finish(block, matrix.names, results)

    def _round_rows(self, solvers: dict[object, GptqSolver], matrix: MatrixOfLinears, rows: range) -> list[Value]:
        """Return the result for some rows. ``solvers`` caches only the last, as they are large."""
        key: object = (matrix.moments, matrix.spec.layer) if self.weighs_rows else matrix
        if key not in solvers:
            solvers.clear()
            solvers[key] = self._solver(matrix)
        return self._rounded(solvers[key], matrix, rows)

    def _rounded(self, solver: GptqSolver, matrix: MatrixOfLinears, rows: range) -> list[Value]:
        """Return codes, scales, zeros and damping of some rows."""
        factor = matrix.factor
        if factor is None:
            result = solver.round(matrix.weights(rows), matrix.shift(rows), matrix.fixed(rows))
        else:
            (weight,) = matrix.weights(rows)
            result = round_with_rows(solver, weight, matrix.shift(rows), factor)
        return [result.codes, result.scales, result.zeros, result.damp]

    def _solver(self, matrix: MatrixOfLinears) -> GptqSolver:
        spec = matrix.spec
        refits = self.refit is True or self._with_original(self.refit) and spec.bits < 8
        settings = GptqSettings(
            matrix.grid(searched=self.scale_search == "mse"),
            spec.group_size,
            self.act_order,
            self.damp,
            sweeps=self.sweeps,
            refit=self.sweeps > 0 and refits and matrix.fixed(range(1)) is None,
        )
        return GptqSolver(matrix.moments.hessian, settings, matrix.moments.drift)

    def _finish(self, block: DecoderBlock, names: tuple[str, ...], results: Sequence[list[Value]]) -> None:
        """Submit the linears of one matrix, and report its damping, the last result of each task."""
        damp = results[0][-1]
        where = f"{block.prefix}.{names[0]}"
        warnings = block.result.warnings
        if not isinstance(damp, float):
            warnings.append(
                f"The Hessian of {where} could not be factored; the layer was quantized with round-to-nearest (RTN)."
            )
        elif damp > self.damp:
            warnings.append(f"The Hessian of {where} needed a damping of {damp:g}.")
        for name in names:
            block.result.remark(name, damp=damp if isinstance(damp, float) else "none: RTN")
        self._finish_tasks(block, names, results)

    def _finish_tasks(self, block: DecoderBlock, names: tuple[str, ...], results: Sequence[list[Value]]) -> None:
        """Submit the linears of one matrix. results: codes, scales, zeros and damping of each task."""
        sizes = [block.linears[name].out_features for name in names]
        whole = [
            torch.cat([value for value in column if isinstance(value, Tensor)]).split(sizes)
            for column in list(zip(*results, strict=True))[:3]
        ]
        for name, codes, scales, zeros in zip(names, *whole, strict=True):
            block.finish(name, (codes.clone(), scales.clone(), zeros.clone()))


class MatrixOfLinears:
    """Linears of a group that have the same scheme, concatenated along N, and the moments of their input."""

    def __init__(
        self, block: DecoderBlock, names: tuple[str, ...], group: tuple[str, ...], moments: Moments, signed: bool
    ) -> None:
        self.names, self.moments = names, moments
        self.signed = signed and block.signed_scales(*names)
        self.spec = block.spec(names[0])
        self._block, self._group = block, group

    def grid(self, searched: bool) -> CodeGrid:
        """Return the grid of the codes, which all linears share."""
        block = self._block
        return block.floats.grid(self.names[0], block.plan.scales, searched, self.signed)

    def fixed(self, rows: range) -> Tensor | None:
        """Return the scales of these rows [n, K / G] if they are not chosen by the loop, else None."""
        scales = [self._block.floats.fixed(name) for name in self.names]
        known = [each for each in scales if each is not None]
        return torch.cat(known)[rows.start : rows.stop] if known else None

    @property
    def factor(self) -> Tensor | None:
        """Return the factor [N, N] of the rows of a single linear; None without."""
        rows, name = self._block.inputs.rows, self.names[0]
        factor = None if rows is None else rows.of(name)
        return None if factor is None else factor.to(self.moments.hessian.device)

    def cuts(self) -> list[range]:
        """Split the rows into tasks of equal size, independent of the number of workers. Experts are not split: there
        are enough of them; nor are linears whose rows make up for each other. On a GPU there are no other workers, and
        tasks are as large as memory allows."""
        total = sum(self._block.linears[name].out_features for name in self.names)
        if expert_pattern(self.names[0]) is not None or self._block.inputs.rows is not None:
            return [range(total)]
        count, hessian = SHARDS, self.moments.hessian
        if hessian.device.type != "cpu":
            count = -(-total * len(hessian) // _MOST_ON_GPU)
        step = max(_FEWEST_ROWS, -(-total // count))
        return [range(first, min(first + step, total)) for first in range(0, total, step)]

    def weights(self, rows: range) -> list[Tensor]:
        """Return the parts of the linears' weights in these rows."""
        parts, first = [], 0
        for name in self.names:
            weight = self._block.weight(name)
            part = weight[max(rows.start - first, 0) : max(rows.stop - first, 0)]
            if len(part):
                parts.append(part)
            first += len(weight)
        return parts

    def shift(self, rows: range) -> Tensor | None:
        """Return the shift of these rows [n, K], or None."""
        shift = self.moments.shift_of(self._block, self._group, self.names)
        return None if shift is None else shift[rows.start : rows.stop]


@dataclass(frozen=True)
class Gptaq(Gptq):
    """The name of GPTQ with ``targets: original`` in older recipes; reports call it gptq."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.targets == "original", "targets", "original, which gptaq means", "Use the rounder gptq.")
