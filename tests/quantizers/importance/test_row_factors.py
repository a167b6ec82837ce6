"""Factors of the rows: sums over shards."""

import torch
from torch import Tensor

from aiakq.quantizers.importance.row_factors import RowFactors, RowSums, finished, merge


def test_a_linear_that_only_some_shards_reach_has_their_sum() -> None:
    def part(**gradients: Tensor) -> list[Tensor | None]:
        sums = RowSums({"one": 2, "other": 3, "none": 1})
        sums.add(gradients)
        return sums.take()  # type: ignore[return-value]

    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0, -1.0]])
    total = part(one=x)
    merge(total, part(one=x, other=y))  # type: ignore[arg-type]
    found = RowFactors(finished(["one", "other", "none"], total), 1e9, None)
    assert torch.equal(found.of("one"), 2 * x.T @ x)  # type: ignore[arg-type]
    assert torch.equal(found.of("other"), y.T @ y)  # type: ignore[arg-type]
    assert found.of("none") is None and found.of("absent") is None
