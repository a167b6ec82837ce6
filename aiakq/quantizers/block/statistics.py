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
    """What is gathered of the inputs of one linear.

    start     makes the totals: tensors of zeros.
    add       ``add(totals, rows, batch)`` adds the finite rows [T, K] of a batch to them, in place.
    maximum   whether the totals of two shards are merged by their element-wise maximum, not by their sum.
    """

    start: Callable[[], list[Tensor]]
    add: Callable[[list[Tensor], Tensor, int], None]
    maximum: bool = False


class Seen:
    """What one pass over the batches saw of the inputs of some linears, by name.

    rows     how many rows were finite.
    dropped  how many were not.
    sizes    the largest magnitude on the batches that are measured; absent where there were none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.rows = dict.fromkeys(names, 0)
        self.dropped = dict.fromkeys(names, 0)
        self.sizes: dict[str, float] = {}

    def finite_rows(self, name: str, x: Tensor, measured: bool) -> Tensor:
        """The finite rows [T, K] of x [..., K], counted."""
        rows = x.reshape(-1, x.shape[-1])
        # One sum tells whether anything is wrong; only then look row by row.
        if not bool(torch.isfinite(rows.sum())):
            finite = torch.isfinite(rows).all(dim=-1)
            self.dropped[name] += int((~finite).sum())
            rows = rows[finite]
        self.rows[name] += len(rows)
        if measured and len(rows):
            self.sizes[name] = max(self.sizes.get(name, 0.0), largest(rows))
        return rows

    def pack(self, totals: Mapping[str, list[Tensor]]) -> list[Value]:
        """This and the totals of the statistics as one list, which ``merge_parts`` merges with others."""
        counts = torch.tensor([[self.rows[name], self.dropped[name]] for name in self.rows])
        sizes = torch.tensor([self.sizes.get(name, -1.0) for name in self.rows], dtype=torch.float64)
        packed: list[Value] = [counts, sizes]
        for name in self.rows:
            packed += [len(totals[name]), *totals[name]]
        return packed

    def unpack(self, packed: list[Value]) -> dict[str, list[Tensor]]:
        """Take over what ``pack`` put into ``packed``; returns the totals by name."""
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
        """The error about a linear of the block ``prefix`` that saw nothing finite."""
        return error(
            "not_finite",
            what=f"Every calibration input of {prefix}.{name}",
            hint="Calibrate on other text, and check that the source model computes sensible output.",
        )


def merge_parts(statistics: Mapping[str, Statistic]) -> Callable[[list[Value], list[Value]], None]:
    """What merges the packed statistics of one shard into those of the shards before, in place."""

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
