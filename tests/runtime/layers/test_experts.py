"""The mixture of experts against its formula, and tokens that do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.experts import GroupedExperts
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.runtime.layers.experts import SparseMLP


def weighted_sum(x: Tensor, weights: dict[str, Tensor], top_k: int, normalize: bool) -> Tensor:
    """The formula in float64, every expert on every token: x [T, K] -> [T, K]."""
    x = x.double()
    shares = F.softmax(x @ weights["router"].double().T, dim=-1)
    kept = torch.zeros_like(shares).scatter_(1, shares.topk(top_k).indices, 1.0) * shares
    if normalize:
        kept = kept / kept.sum(-1, keepdim=True)
    out = torch.einsum("te,tek->tk", kept, torch.einsum("tk,enk->ten", x, weights["experts"].double()))
    if "shared" in weights:
        shared = x @ weights["shared"].double().T
        out += torch.sigmoid(x @ weights["gate"].double().T) * shared if "gate" in weights else shared
    return out


@dataclass
class OneByOne(GroupedExperts):
    """Experts of any kind, which get rows in multiples of 16."""

    experts: Sequence[Callable[[Tensor], Tensor]]

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See GroupedExperts."""
        parts = zip(x.split(list(counts)), self.experts, strict=True)
        found = [expert(F.pad(own, (0, 0, 0, -len(own) % 16)))[: len(own)] for own, expert in parts if len(own)]
        return torch.cat(found) if found else x


def mixture_of(weights: dict[str, Tensor], top_k: int, normalize: bool) -> SparseMLP:
    linears = {name: TorchDense(weights[name]) for name in ("router", "shared", "gate") if name in weights}
    experts = [TorchDense(weight) for weight in weights["experts"]]
    return SparseMLP(
        linears["router"],
        OneByOne(experts),
        len(experts),
        SoftmaxRouting(top_k, normalize),
        shared=linears.get("shared"),
        shared_gate=linears.get("gate"),
    )


@pytest.fixture
def some_weights() -> Callable[..., dict[str, Tensor]]:
    """``some_weights(count, width, dtype, *names)`` -> router, experts, and the named layers of the shared expert."""

    def make(count: int, width: int, dtype: torch.dtype, *names: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(count * width)
        shapes = {"router": (count, width), "experts": (count, width, width), "shared": (width, width)}
        shapes["gate"] = (1, width)
        asked = ("router", "experts", *names)
        return {name: (torch.randn(shapes[name], generator=generator) / width**0.5).to(dtype) for name in asked}

    return make


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("names", [(), ("shared",), ("shared", "gate")], ids=["none", "shared", "gated"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("count", "top_k", "width", "tokens"), [(7, 3, 40, 33), (4, 1, 33, 5), (5, 5, 8, 1)])
def test_experts_are_weighted_by_the_router(
    count: int,
    top_k: int,
    width: int,
    tokens: int,
    normalize: bool,
    names: tuple[str, ...],
    dtype: torch.dtype,
    tolerance: float,
    some_weights: Callable[..., dict[str, Tensor]],
) -> None:
    weights = some_weights(count, width, dtype, *names)
    # Router scores far apart, so that rounding chooses no other experts.
    weights["router"] *= 8
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    scores = (x.double() @ weights["router"].double().T).sort(descending=True).values
    if top_k < count:
        x = x[scores[:, top_k - 1] - scores[:, top_k] > 0.5]
    found = mixture_of(weights, top_k, normalize)(x)
    expected = weighted_sum(x, weights, top_k, normalize)
    assert len(x) and found.dtype == dtype and found.shape == x.shape
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


def test_no_token_gives_no_row(some_weights: Callable[..., dict[str, Tensor]]) -> None:
    weights = some_weights(3, 8, torch.float32, "shared", "gate")
    assert mixture_of(weights, 2, True)(torch.empty(0, 8)).shape == (0, 8)


def test_a_token_does_not_depend_on_the_others() -> None:
    make = torch.Generator().manual_seed(0)

    def linear(n: int, k: int) -> TorchDense:
        return TorchDense(torch.randn(n, k, generator=make))

    experts = [linear(48, 48) for _ in range(7)]
    mixture = SparseMLP(
        linear(7, 48), OneByOne(experts), 7, SoftmaxRouting(3, True), shared=linear(48, 48), shared_gate=linear(1, 48)
    )
    x = torch.randn(64, 48, generator=make)
    together = mixture(x)
    some = [list(range(start, start + count)) for count in (4, 12, 20) for start in range(40)]
    for rows in ([5, 17, 40, 63], list(reversed(range(64))), *some):
        assert torch.equal(mixture(x[rows]), together[rows])


def test_experts_that_get_no_token_do_not_run() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("no token was sent here")

    router = TorchDense(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    mixture = SparseMLP(router, OneByOne([lambda x: 2 * x, never]), 2, SoftmaxRouting(1, True))
    x = torch.tensor([[1.0, 5.0], [2.0, -1.0], [3.0, 0.5]])
    assert torch.equal(mixture(x), 2 * x)
