"""Largest magnitudes of weights and inputs of a block, before and after quantization."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


class Magnitudes:
    """The largest magnitude of each linear's weight and input, by its name inside the block.

    Inputs before are those of the first look a method takes at a linear, which is before anything is folded into what
    feeds it; linears that share an input share the number.
    """

    def __init__(self) -> None:
        self.weight_before: dict[str, float] = {}
        self.weight_after: dict[str, float] = {}
        self.input_before: dict[str, float] = {}
        self.input_after: dict[str, float] = {}

    def first_look(self, groups: Iterable[tuple[str, ...]], seen: dict[str, float]) -> None:
        """Keep what one pass saw of some linears' inputs, for all that share them and were not looked at before."""
        shared = {name: group for group in groups for name in group}
        for name, value in seen.items():
            for other in shared.get(name, (name,)):
                self.input_before.setdefault(other, value)

    def of(self, name: str) -> dict[str, float | None]:
        """What the report says of a linear. An input no method looked at is after what it was before."""
        after = self.input_after.get(name)
        found = {
            "weight_before": self.weight_before.get(name),
            "weight_after": self.weight_after.get(name),
            "input_before": self.input_before.get(name, after),
            "input_after": after,
        }
        return {key: None if value is None or not math.isfinite(value) else value for key, value in found.items()}


def largest(x: Tensor) -> float:
    """The largest magnitude of a tensor; 0 of an empty one."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return max(-float(low), float(high))
