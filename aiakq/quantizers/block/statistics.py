"""Statistics of the inputs of linears: sums or maxima over all calibration tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.numerics.magnitudes import largest
from aiakq.quantizers.workers.protocol import Value


@dataclass(frozen=True)
class Statistic:
    """A statistic of the inputs of one linear.

    start     creates the totals: tensors of zeros.
    add       ``add(totals, rows, batch)`` accumulates the finite rows [T, K] of a batch into the totals, in place.
    maximum   whether totals of two shards are merged by their element-wise maximum instead of their sum.
    weighted  whether the terms of tokens are multiplied by their weights: ``add(totals, rows, batch, weights)`` then
              also receives those of the rows, [T] float32, or None if all are 1.
    """

    start: Callable[[], list[Tensor]]
    add: Callable[..., None]
    maximum: bool = False
    weighted: bool = False


class Seen:
    """Observations of one pass over the batches on the inputs of some linears, by name.

    rows     number of finite rows.
    dropped  number of rows that were not finite.
    sizes    largest magnitude on the measured batches; absent if there were none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.rows = dict.fromkeys(names, 0)
        self.dropped = dict.fromkeys(names, 0)
        self.sizes: dict[str, float] = {}

    def finite_rows(
        self, name: str, x: Tensor, measured: bool, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return and count the finite rows [T, K] of x [..., K]; with them the ``weights`` of these rows."""
        rows = x.reshape(-1, x.shape[-1])
        # One sum detects any non-finite value; only then check row by row.
        if not bool(torch.isfinite(rows.sum())):
            finite = torch.isfinite(rows).all(dim=-1)
            self.dropped[name] += int((~finite).sum())
            rows = rows[finite]
            weights = None if weights is None else weights[finite]
        self.rows[name] += len(rows)
        if measured and len(rows):
            self.sizes[name] = max(self.sizes.get(name, 0.0), largest(rows))
        return rows, weights

    def pack(self, totals: Mapping[str, list[Tensor]]) -> list[Value]:
        """Pack the observations and the totals of the statistics into one list, which ``merge_parts`` merges."""
        counts = torch.tensor([[self.rows[name], self.dropped[name]] for name in self.rows])
        sizes = torch.tensor([self.sizes.get(name, -1.0) for name in self.rows], dtype=torch.float64)
        packed: list[Value] = [counts, sizes]
        for name in self.rows:
            packed += [len(totals[name]), *totals[name]]
        return packed

    def unpack(self, packed: list[Value]) -> dict[str, list[Tensor]]:
        """Restore from ``packed``, the result of ``pack``; return the totals by name."""
        counts, sizes, *rest = packed
        assert isinstance(counts, Tensor) and isinstance(sizes, Tensor)
        totals: dict[str, list[Tensor]] = {}
        for name, (rows, dropped), size in zip(self.rows, counts.tolist(), sizes.tolist(), strict=True):
            self.rows[name], self.dropped[name] = rows, dropped
            if size >= 0:
                self.sizes[name] = size
            length = rest.pop(0)
            assert isinstance(length, int)
            totals[name] = [tensor for tensor in rest[:length] if isinstance(tensor, Tensor)]
            del rest[:length]
        return totals

    @staticmethod
    def nothing(name: str, prefix: str) -> AiakqError:
        """Return the error for a linear of the block ``prefix`` that had no finite input."""
        return error(
            "not_finite",
            what=f"Every calibration input of {prefix}.{name}",
            hint="Calibrate on other text, and check that the source model computes sensible output.",
        )


def merge_parts(statistics: Mapping[str, Statistic]) -> Callable[[list[Value], list[Value]], None]:
    """Return a function that merges the packed statistics of one shard into those of previous shards, in place."""

    def merge(total: list[Value], part: list[Value]) -> None:
        places = zip(total, part, strict=True)
        _add(*next(places))
        _raise_to(*next(places))
        for statistic in statistics.values():
            length, _ = next(places)
            assert isinstance(length, int)
            for _ in range(length):
                (_raise_to if statistic.maximum else _add)(*next(places))

    return merge


def _add(total: Value, part: Value) -> None:
    assert isinstance(total, Tensor) and isinstance(part, Tensor)
    total.add_(part)


def _raise_to(total: Value, part: Value) -> None:
    assert isinstance(total, Tensor) and isinstance(part, Tensor)
    torch.maximum(total, part, out=total)
