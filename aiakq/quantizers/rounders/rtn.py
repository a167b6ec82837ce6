"""RTN: rounds every weight to the nearest code of its group.

It needs no calibration. At 8 bits with one scale per row it loses almost nothing, because the largest weight of a row
is rarely far from the rest.

With ``targets: original`` the weights are first moved to those that make up for the errors of the layer's inputs and of
the residual stream, ``W* = W + S H^-1`` (targets.py), and these are rounded. That needs calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from aiakq.constraints import declare
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.numerics.cholesky import factors
from aiakq.quantizers.recipe import Recipe, Rounder
from aiakq.quantizers.rounders.targets import Moments, OriginalTargets, runs
from aiakq.rounding.integers import Rounding
from aiakq.spec import LayerSpec

#: Damping added to the second moment of the inputs, as a fraction of its mean diagonal.
_DAMP = 0.01


@dataclass(frozen=True)
class Rtn(Rounder):
    """Round to nearest.

    scale_search  ``minmax`` uses the full range of a group; ``near`` also ranges within 1 % of it and ``mse`` smaller
                  ones down to half of it, by the error of its weights.
    signed        whether ``mse`` may choose negative scales for symmetric codes of at most 4 bits.
    targets       what the outputs should be near to: ``own``, those of the unrounded weights on the same inputs, or
                  ``original``, those of the unquantized model.
    alpha, beta   which part of the errors of the inputs, and of the residual stream, ``original`` makes up for.
    """

    scale_search: str = declare("minmax", choices=("minmax", "mse", "near"))
    signed: bool = True
    targets: str = declare("own", choices=("own", "original"))
    alpha: float = declare(0.5, low=0.0, high=1.0, expected="between 0 and 1")
    beta: float = declare(0.5, low=0.0, high=1.0, expected="between 0 and 1")

    name = "rtn"
    takes_clip = True

    @property
    def needs_original(self) -> bool:  # type: ignore[override]
        return self.targets == "original" and bool(self.alpha or self.beta)

    @property
    def needs_inputs(self) -> bool:  # type: ignore[override]
        return self.needs_original

    @property
    def by_parts(self) -> bool:  # type: ignore[override]
        return not self.needs_original

    @property
    def restartable(self) -> bool:  # type: ignore[override]
        # The inputs of the original block are replaced by its outputs while it is rounded.
        return not self.needs_original

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        if scheme.is_float and self.scale_search == "near":
            return "near ranges are for integers; floats have minmax and mse"
        if recipe.clips and self.scale_search != "minmax":
            return "a transform before it chooses the ranges already"
        return None

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        if block.original is not None and self.needs_original:
            self._round_towards_original(block, part)
        left = [name for name in part.linears if name not in block.result.finished]
        block.finish_shared({name: self._task(block, name, block.weight(name)) for name in left})

    def _round_towards_original(self, block: DecoderBlock, part: BlockPart) -> None:
        targets = OriginalTargets(block, self.alpha, self.beta)
        for run in runs(part.groups):
            tasks: dict[str, Callable[[], Rounding]] = {}
            for group in run:
                moved = _MovedWeights(block, group, targets.moments(group))
                for name in group:
                    tasks[name] = partial(self._moved_and_rounded, block, moved, name)
            block.finish_shared(tasks)

    def _moved_and_rounded(self, block: DecoderBlock, moved: _MovedWeights, name: str) -> Rounding:
        return self._task(block, name, moved.weight(name))()

    def _task(self, block: DecoderBlock, name: str, weight: Tensor) -> Callable[[], Rounding]:
        if self.scale_search == "minmax":
            return partial(block.rtn, name, block.clip.get(name), weight)
        return partial(block.rtn_searched, name, self.scale_search == "near", self.signed, weight)


@dataclass(eq=False)
class _MovedWeights:
    """The weights W* of a group, from the moments of its input."""

    block: DecoderBlock
    group: tuple[str, ...]
    moments: Moments
    _upper: list[Tensor | None] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        """Return the weight [N, K] to round: W* = W + S U^T U, or W if the moments cannot be factored."""
        weight, moments = self.block.weight(name), self.moments
        shift = moments.shift_of(self.block, self.group, (name,))
        if shift is None:
            if moments.drift is None:
                return weight
            shift = weight @ moments.drift
        if not self._upper:
            solution = factors(moments.hessian, None, _DAMP)
            self._upper.append(None if solution is None else solution[1])
        (upper,) = self._upper
        return weight if upper is None else weight + shift @ upper.T @ upper
