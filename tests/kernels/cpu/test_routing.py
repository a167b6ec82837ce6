"""Native routing against the torch reference: the same experts, also where scores are equal or NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu.routing import NativeRouting
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.routing import Routing, SigmoidRouting, SoftmaxRouting, SparseMixerRouting, TopSigmoidRouting

INFINITY = float("inf")


def correction(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)) / 8


def rules(count: int, top_k: int) -> dict[str, Routing]:
    """Name -> rule for ``count`` experts, of which there are groups if their number is a multiple of 8."""
    sigmoid, bias = Ops(torch.device("cpu"), torch.float32).activation("sigmoid"), correction(count)
    found: dict[str, Routing] = {
        "softmax": SoftmaxRouting(top_k, normalize=False),
        "softmax, normalized, scaled": SoftmaxRouting(top_k, normalize=True, scale=2.5),
        "softmax, bias": SoftmaxRouting(top_k, normalize=True, correction=bias, smallest_sum=0.3),
        "sigmoid": SigmoidRouting(top_k, normalize=False, scale=1.0, sigmoid=sigmoid),
        "sigmoid, bias": SigmoidRouting(top_k, True, 1.5, sigmoid, bias, epsilon=1e-3),
        "top sigmoid": TopSigmoidRouting(top_k, sigmoid),
    }
    if top_k == 2:
        found["sparse mixer"] = SparseMixerRouting(0.1)
    if count % 8 == 0 and top_k <= count // 4:
        found["softmax, groups"] = SoftmaxRouting(top_k, normalize=True, groups=(4, 2))
        found["sigmoid, groups"] = SigmoidRouting(top_k, True, 2.5, sigmoid, bias, groups=(4, 3))
    return found


SIZES = [(8, 2), (5, 5), (1, 1), (64, 6), (128, 8), (640, 10)]
CASES = [(count, top_k, name) for count, top_k in SIZES for name in rules(count, top_k)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "top_k", "name"), CASES)
def test_routing_selects_and_weighs_as_the_reference(isa, threads, count, top_k, name, dtype):
    rule = rules(count, top_k)[name]
    native = Ops(torch.device("cpu"), dtype).routing(rule, count)
    assert isinstance(native.router, NativeRouting) and native.top_k == top_k
    # Scores are equal only where a test says so: in bfloat16 they are multiples of a power of two, in random order.
    make = torch.Generator().manual_seed(count)
    scores = torch.stack([torch.randperm(count, generator=make) for _ in range(21)]).float() / 16 - 2
    scores = (scores if count <= 256 else scores + torch.rand(scores.shape, generator=make) / 64).to(dtype)
    for number in (1, 3):
        threads(number)
        for rows in (scores, scores[:1], scores[:0], torch.cat([scores, scores], 1)[:, :count]):
            weights, selected = native(rows)
            expected, chosen = rule(rows)
            assert weights.dtype == torch.float32 and selected.dtype == torch.int64
            assert torch.equal(selected, chosen)
            torch.testing.assert_close(weights, expected, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize(("count", "top_k", "name"), CASES)
def test_equal_scores_select_the_experts_that_torch_selects(count, top_k, name):
    rule = rules(count, top_k)[name]
    native = Ops(torch.device("cpu"), torch.float32).routing(rule, count)
    make = torch.Generator().manual_seed(count)
    for values in (1, 2, 4):
        scores = torch.randint(0, values, (50, count), generator=make).float()
        if "bias" in name or "sigmoid, groups" in name:
            scores[:] = scores[:, :1]  # the bias decides; its values are far apart
        (weights, selected), (expected, chosen) = native(scores), rule(scores)
        assert torch.equal(selected, chosen)
        torch.testing.assert_close(weights, expected, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize(("count", "top_k", "name"), CASES)
def test_values_that_are_not_finite_give_what_torch_gives(count, top_k, name):
    rule = rules(count, top_k)[name]
    native = Ops(torch.device("cpu"), torch.float32).routing(rule, count)
    scores = torch.randn(6, count, generator=torch.Generator().manual_seed(count))
    scores[0, count // 2] = scores[1] = float("nan")
    scores[2, count // 2], scores[3, count // 2], scores[4] = INFINITY, -INFINITY, -INFINITY
    scores[5] *= 1e30
    (weights, selected), (expected, chosen) = native(scores), rule(scores)
    assert torch.equal(selected, chosen)
    torch.testing.assert_close(weights, expected, rtol=4e-6, atol=1e-30, equal_nan=True)


def test_a_rule_that_no_kernel_knows_is_computed_as_it_says():
    class First:
        kind, top_k = "", 1

        def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ones(len(scores), 1), torch.zeros(len(scores), 1, dtype=torch.int64)

    ops, rule = Ops(torch.device("cpu"), torch.float32), First()
    assert ops.routing(rule, 4).router is rule
    assert ops.routing(SoftmaxRouting(2, True), 1024).router != ops.routing(SoftmaxRouting(2, True), 1025).router
    assert isinstance(ops.routing(SoftmaxRouting(2, True), 1024).router, NativeRouting)
    assert isinstance(ops.routing(SoftmaxRouting(2, True), 1025).router, SoftmaxRouting)


def test_other_numbers_of_experts_are_refused():
    native = Ops(torch.device("cpu"), torch.float32).routing(SoftmaxRouting(2, True), 8)
    with pytest.raises(ValueError, match=r"scores \[3, 7\] of 8 experts"):
        native(torch.zeros(3, 7))
