"""Stage: the layers of a model that one rank of a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Layers ``first`` to ``end`` - 1 of ``num_layers``; the first stage also has the embedding, the last the head."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.first, self.end)


def whole_model(num_layers: int) -> Stage:
    """The only stage of a model that is not distributed."""
    return Stage(0, num_layers, num_layers)


def balanced_stages(layer_bytes: Sequence[int], before: int, after: int, count: int) -> list[Stage]:
    """``count`` stages of consecutive layers, at least one each, the largest as small as possible.

    layer_bytes  that a step reads of each layer's weights.
    before       of what only the first stage reads, before its layers.
    after        of what only the last stage reads: the head.
    """
    total = len(layer_bytes)
    assert 0 < count <= total

    # best[n]: (largest stage, bounds) for the layers up to n, in as many stages as were added so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage in range(count):
        following: dict[int, tuple[int, list[int]]] = {}
        last = stage == count - 1
        for end in [total] if last else range(stage + 1, total - (count - stage) + 2):
            found = []
            for start, (largest, bounds) in best.items():
                if start < end:
                    size = sum(layer_bytes[start:end]) + before * (start == 0) + after * last
                    found.append((max(largest, size), [*bounds, end]))
            following[end] = min(found)
        best = following
    bounds = best[total][1]
    return [Stage(first, end, total) for first, end in zip(bounds, bounds[1:], strict=False)]
