"""Stage: the layers of a model that belong to one pipeline stage."""

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
        """Indices of the stage's layers."""
        return range(self.first, self.end)


def whole_model(num_layers: int) -> Stage:
    """Return the stage of a model without pipeline parallelism."""
    return Stage(0, num_layers, num_layers)


def balanced_stages(layer_bytes: Sequence[int], before: int, after: int, count: int) -> list[Stage]:
    """Partition layers into ``count`` stages of consecutive layers such that the largest stage is as small as possible.

    Every stage has at least one layer.

    layer_bytes  bytes of each layer's weights that a step reads.
    before       bytes that only the first stage reads, before its layers.
    after        bytes that only the last stage reads: the output layer.
    """
    total = len(layer_bytes)
    assert 0 < count <= total

    # best[n]: (size of the largest stage, bounds) of the best partition of the first n layers into the stages so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage in range(count):
        following: dict[int, tuple[int, list[int]]] = {}
        last = stage == count - 1
        for end in [total] if last else range(stage + 1, total - (count - stage) + 2):
            candidates = []
            for start, (largest, bounds) in best.items():
                if start < end:
                    size = sum(layer_bytes[start:end]) + before * (start == 0) + after * last
                    candidates.append((max(largest, size), [*bounds, end]))
            following[end] = min(candidates)
        best = following
    bounds = best[total][1]
    return [Stage(first, end, total) for first, end in zip(bounds, bounds[1:], strict=False)]
