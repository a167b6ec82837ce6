"""A linear with fixed codes, against autograd through its dense weight."""

import pytest
import torch

from aiakq.kernels.types import QWeight
from aiakq.quantizers.tuning.scaled_linear import ScaledLinear


@pytest.mark.parametrize(("group", "zeros", "bias"), [(32, False, True), (32, True, False), (96, False, False)])
def test_output_and_gradients_are_those_of_the_dense_weight(group: int, zeros: bool, bias: bool) -> None:
    n, k = 24, 96 if group == 96 else 80  # the last group is shorter
    make = torch.Generator().manual_seed(0)
    groups = -(-k // group)
    scales = torch.randn(n, groups, generator=make)  # of either sign
    weight = QWeight(
        scheme="w3a16",
        codes=torch.randint(0, 8, (n, k), generator=make, dtype=torch.uint8),
        scales=scales.half(),
        zeros=torch.randint(0, 8, (n, groups), generator=make, dtype=torch.uint8) if zeros else None,
        bias=torch.randn(n, generator=make) if bias else None,
        group_size=group,
    )
    linear = ScaledLinear(weight, torch.device("cpu"))
    with torch.no_grad():
        linear.factor.mul_(1 + 0.1 * torch.randn(n, groups, generator=make))
    x = torch.randn(2, 5, k, generator=make, requires_grad=True)
    upstream = torch.randn(2, 5, n, generator=make)
    found = linear(x)
    gradients = torch.autograd.grad(found, (x, linear.factor), upstream)

    spread = (scales.half().float() * linear.factor).repeat_interleave(group, 1)[:, :k]
    zero = torch.full((n, groups), 4.0) if weight.zeros is None else weight.zeros.float()
    dense = (weight.codes.float() - zero.repeat_interleave(group, 1)[:, :k]) * spread
    wanted = torch.nn.functional.linear(x, dense, weight.bias)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(linear.weight, dense)
    for one, other in zip(gradients, torch.autograd.grad(wanted, (x, linear.factor), upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
