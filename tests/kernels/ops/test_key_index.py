"""The index of keys: scores beside the formula, and which positions are taken, also of equal and broken scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import key_index
from aiakq.kernels.ops.key_index import best_positions, index_scores, row_blocks


def inputs(rows: int, heads: int, length: int, size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (rows, heads, size), (rows, heads), (length, size)
    queries, weights, keys = (torch.randn(shape, generator=draw) for shape in shapes)
    return queries, weights, keys


@pytest.mark.parametrize(("rows", "heads", "length"), [(1, 3, 1), (5, 4, 128), (6, 7, 300)])
def test_scores_are_weighted_sums_of_positive_products(rows: int, heads: int, length: int) -> None:
    queries, weights, keys = inputs(rows, heads, length)
    products = torch.einsum("rhd,ld->rhl", queries.double(), keys.double()).mul(0.2).relu()
    expected = torch.einsum("rhl,rh->rl", products, weights.double())
    scores = index_scores(queries, weights, keys, 0.2)
    assert scores.dtype == torch.float32 and scores.shape == (rows, length)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_scores_of_a_row_do_not_depend_on_other_rows_and_later_positions() -> None:
    queries, weights, keys = inputs(9, 5, 400)
    together = index_scores(queries, weights, keys, 0.2)
    for row, length in ((0, 400), (4, 130), (8, 257)):
        one = slice(row, row + 1)
        alone = index_scores(queries[one], weights[one], keys[:length], 0.2)
        assert torch.equal(alone[0], together[row, :length])


def test_the_best_positions_are_those_of_the_highest_scores_within_each_length() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([6, 7, 20, 50])
    best = best_positions(scores, lengths, 6)
    for row, length in enumerate(lengths.tolist()):
        expected = sorted(range(length), key=lambda at, row=row: -scores[row, at])[:6]
        assert best[row].tolist() == sorted(expected)


def test_of_equal_scores_the_first_positions_are_taken() -> None:
    scores = torch.tensor([[0.0, 3.0, 0.0, 1.0, -0.0, 0.0], [1.0] * 6])
    assert best_positions(scores, torch.tensor([6, 5]), 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_scores_that_are_not_numbers_are_the_lowest() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, -inf, 2.0, inf, nan], [nan] * 5])
    assert best_positions(scores, torch.tensor([5, 3]), 3).tolist() == [[0, 2, 3], [0, 1, 2]]


def test_blocks_of_rows_cover_all_and_limit_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_MAX_PRODUCTS", 8 * 3 * 256)
    assert row_blocks(19, 3, 200) == [range(0, 8), range(8, 16), range(16, 19)]
    assert row_blocks(5, 100, 2000) == [range(0, 4), range(4, 5)], "never less than whole products"
