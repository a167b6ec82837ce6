"""Second moments: half of the work gives all of the matrix."""

import pytest
import torch

from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror


@pytest.mark.parametrize("k", [7, 300, 2300])
def test_one_triangle_of_a_second_moment_is_enough(k: int) -> None:
    make = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, k, generator=make), torch.randn(9, k, generator=make)
    total = torch.zeros(k, k)
    add_second_moment(total, x)
    add_second_moment(total, y)
    got = mirror(total)
    wanted = x.T.double() @ x.double() + y.T.double() @ y.double()
    assert torch.equal(got, got.T)
    assert float((got - wanted).abs().max()) < 1e-4
