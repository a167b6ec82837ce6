"""PromptPooler: pooling of one prompt, whatever its chunks."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.runtime.pooling.pooler import PromptPooler
from aiakq.runtime.protocol.pooling_params import REDUCTIONS, Pooled, Pooling
from aiakq.runtime.protocol.step import NOT_FINITE


def _pooled(pooling: Pooling, rows: torch.Tensor, cuts: list[int]) -> Pooled:
    pooler = PromptPooler(pooling, None)
    for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        pooler.add(rows[start:end], start, end - start)
    found, failure = pooler.result(rows.shape[1])
    assert failure is None and found is not None
    return found


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("kind", [*REDUCTIONS, "ALL"])
def test_the_result_does_not_depend_on_the_chunks(kind, width):
    torch.manual_seed(0)
    draw = random.Random(width)
    rows = torch.randn(300, width) * torch.logspace(-3, 4, 300)[:, None]
    pooling = Pooling(kind, normalize=True)
    whole = _pooled(pooling, rows, [])
    for _ in range(20):
        assert _pooled(pooling, rows, sorted(draw.randrange(301) for _ in range(draw.randrange(6)))) == whole
    assert whole.num_rows == (300 if kind == "ALL" else 1)


def test_a_mean_is_rounded_once():
    rows = torch.randn(1000, 5, dtype=torch.float64).float() + 100
    found = torch.tensor(_pooled(Pooling("MEAN"), rows, [1, 2, 500]).vector())
    assert torch.equal(found, rows.double().mean(0).float())


def test_dimensions_are_truncated_before_normalization():
    rows = torch.tensor([[3.0, 4.0, 12.0]])
    assert _pooled(Pooling("LAST", normalize=True, dimensions=2), rows, []).vector() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("activation", "function"), [("softmax", torch.softmax), ("sigmoid", lambda x, dim: x.sigmoid())]
)
def test_activations(activation, function):
    rows = torch.randn(2, 3)
    found = torch.tensor(_pooled(Pooling("ALL", activation=activation), rows, [1]).rows())
    torch.testing.assert_close(found, function(rows, dim=-1))


def test_without_positions_to_pool_the_result_is_empty():
    found, failure = PromptPooler(Pooling("STEP", normalize=True, step_tag_id=1), None).result(6)
    assert found == Pooled(b"", 6) and failure is None and found.num_rows == 0 and found.rows() == []


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_values_that_are_not_finite_give_an_error(kind, value):
    pooler = PromptPooler(Pooling(kind, normalize=True), None)
    pooler.add(torch.tensor([[1.0, value]]), 0, 1)
    assert pooler.result(2) == (None, NOT_FINITE)


def test_adding_a_chunk_twice_fails():
    pooler = PromptPooler(Pooling("MEAN"), None)
    pooler.add(torch.ones(2, 3), 0, 2)
    pooler.add(torch.ones(2, 3), 2, 2)
    with pytest.raises(AssertionError, match="from 2 on follows one up to 4"):
        pooler.add(torch.ones(2, 3), 2, 2)
