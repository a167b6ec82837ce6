"""Largest magnitudes of weights and inputs of a block, before and after quantization."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


class Magnitudes:
    """The largest magnitude of each linear's weight and input, by its name inside the block.

    Input magnitudes "before" are those of the first pass over a linear, before anything is folded into the preceding
    layer; linears that share an input share them.
    """

    def __init__(self) -> None:
        self.weight_before: dict[str, float] = {}
        self.weight_after: dict[str, float] = {}
        self.input_before: dict[str, float] = {}
        self.input_after: dict[str, float] = {}

    def first_look(self, groups: Iterable[tuple[str, ...]], seen: dict[str, float]) -> None:
        """Record the input magnitudes of one pass for linears, and those sharing their input, not seen before."""
        shared = {name: group for group in groups for name in group}
        for name, value in seen.items():
            for other in shared.get(name, (name,)):
                self.input_before.setdefault(other, value)

    def of(self, name: str) -> dict[str, float | None]:
        """Return the magnitudes of a linear for the report. An input seen by no method is the same before and after."""
        after = self.input_after.get(name)
        magnitudes = {
            "weight_before": self.weight_before.get(name),
            "weight_after": self.weight_after.get(name),
            "input_before": self.input_before.get(name, after),
            "input_after": after,
        }
        return {key: None if value is None or not math.isfinite(value) else value for key, value in magnitudes.items()}


def largest(x: Tensor) -> float:
    """The largest magnitude of a tensor; 0 of an empty one."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return max(-float(low), float(high))
