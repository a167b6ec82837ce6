"""AWQ: both searches contain doing nothing, and find what was planted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.awq import best_limits, candidates
from aiakq.quantizers.rounding import dequantize, grouped, round_weight


def problem(n: int = 64, k: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, k, generator=make) * torch.exp(torch.randn(k, generator=make))
    # Student-like weights: a few are far out.
    weight = torch.randn(n, k, generator=make) / torch.rand(n, k, generator=make).clamp(min=0.1)
    return weight * 0.02, x.T @ x / len(x)


def group_losses(weight: Tensor, rounded: Any, gram: Tensor, size: int) -> Tensor:
    """[N, groups]: the squared error of each group's own output."""
    gap = grouped(dequantize(*rounded, size) - weight, size).double()
    parts = [gram[i : i + size, i : i + size].double() for i in range(0, weight.shape[1], size)]
    return torch.stack([((gap[:, i] @ part) * gap[:, i]).sum(-1) for i, part in enumerate(parts)], dim=1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_no_group_is_worse_than_plain_rounding(symmetric: bool, size: int, bits: int) -> None:
    weight, gram = problem()
    limits = best_limits(weight, gram, bits, size, symmetric, torch.float16)
    plain = group_losses(weight, round_weight(weight, bits, size, symmetric, torch.float16), gram, size)
    cut = group_losses(weight, round_weight(weight, bits, size, symmetric, torch.float16, limits), gram, size)
    assert bool((cut <= plain * (1 + 1e-4)).all())
    assert float(cut.sum()) < 0.95 * float(plain.sum())
    assert bool((limits <= grouped(weight, size).abs().amax(-1) + 1e-9).all())


def test_the_grid_begins_with_doing_nothing() -> None:
    make = torch.Generator().manual_seed(0)
    activations, weights = torch.rand(64, generator=make), torch.rand(64, generator=make)
    tried = list(candidates(activations, weights))
    assert len(tried) == 21
    assert torch.equal(tried[0], torch.ones(64))
    for scales in tried:
        assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())
        assert float(scales.max() * scales.min()) == pytest.approx(1.0, rel=1e-4)


def test_the_grid_survives_channels_that_never_fire() -> None:
    for activations in (torch.zeros(8), torch.tensor([0.0, 1, 0, 1, 0, 1, 1e-30, 1e30])):
        for scales in candidates(activations, torch.zeros(8)):
            assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())


def test_scales_rescue_a_channel_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One input channel is a hundred times louder: the best scales shrink its rounding error."""
    from torch import nn

    from aiakq.quantizers import awq
    from aiakq.quantizers.activations import Activations
    from aiakq.quantizers.groups import Heads, Pair
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.work import BlockWork, Plan
    from aiakq.spec import QuantSpec

    make = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=make) * 0.02
    loud = torch.ones(128)
    loud[17] = 100.0
    gram = torch.diag(loud.square())
    spec = QuantSpec(method="awq", format="awq", bits=4, group_size=128, symmetric=False)
    block = nn.ModuleDict({"linear": nn.Linear(128, 64, bias=False)})
    block["linear"].weight.data.copy_(weight)  # type: ignore[union-attr, operator]
    plan = Plan(QuantizeOptions("a", "b", "awq"), spec, torch.float16, torch.float16, Heads(1, 1))
    work = BlockWork(block, 0, "block", plan, [("linear",)], Activations([], {}, torch.device("cpu")), [])
    pair = Pair("norm", ("linear",), "linear")
    loss = awq._loss(work, pair, gram, None)
    scales = awq.best_scales(work, pair, loud, loss)
    assert float(scales[17]) > 3 * float(scales.median())

    def error(scales: Tensor) -> float:
        rounded = round_weight(weight * scales, 4, 128, False, torch.float16)
        return loss({"linear": dequantize(*rounded, 128) / scales})

    assert error(scales) < 0.3 * error(torch.ones(128))
