"""Scales in two levels: exact, and without effect on products."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import linear
from aiakq.kernels.cpu.scale_steps import in_steps, narrow
from aiakq.kernels.types import QWeight

#: Integers of K-quants -> groups that share a step.
INTEGERS = {(0, 63): 8, (-128, 127): 16, (-32, 31): 16, (0, 15): 16}


def two_levels(n: int, groups: int, ends: tuple[int, int], count: int) -> torch.Tensor:
    """Return [N, groups] float32: integers between ``ends``, both of which are there, times numbers of float16."""
    make = torch.Generator().manual_seed(groups)
    integers = torch.randint(ends[0], ends[1] + 1, (n, groups), generator=make).float()
    integers[0, 0], integers[1, 0] = ends
    steps = torch.randn(n, -(-groups // count), generator=make).half().float()
    return integers * steps.repeat_interleave(count, dim=1)[:, :groups]


@pytest.mark.parametrize("ends", INTEGERS)
def test_products_with_integers_are_taken_apart_exactly(ends):
    count = INTEGERS[ends]
    values = two_levels(300, 2 * count + 3, ends, count)
    values[7] = 0
    found = in_steps(values, count)
    assert found is not None and found.integers.dtype == torch.int8
    steps = found.steps.repeat_interleave(count, dim=1)[:, : values.shape[1]]
    assert torch.equal(found.integers.float() * steps, values)


def test_other_values_are_refused():
    assert in_steps(torch.rand(40, 16), 8) is None
    one = two_levels(2000, 16, (0, 63), 8)
    one[999, 3] *= 1.01
    assert in_steps(one, 8) is None


def test_values_are_narrowed_only_if_that_is_exact():
    assert narrow(torch.tensor([0.5, -3.0])).dtype == torch.float16
    assert narrow(torch.tensor([2.0**-60, 2.0**20])).dtype == torch.bfloat16
    assert narrow(torch.tensor([0.1])).dtype == torch.float32
    assert narrow(torch.tensor([0.1]).half()).dtype == torch.float16


@pytest.mark.parametrize(("bits", "group", "ends"), [(4, 32, (0, 63)), (6, 16, (-128, 127)), (2, 16, (0, 15))])
@pytest.mark.parametrize("exact", [True, False])
def test_products_have_the_same_bits_with_and_without_steps(isa, bits, group, ends, exact, monkeypatch):
    n, k, count = 70, 512, 256 // group
    make = torch.Generator().manual_seed(bits)
    offsets = -two_levels(n, k // group, (0, ends[1]), count) if bits != 6 else None
    weight = QWeight(
        f"w{bits}a16",
        torch.randint(0, 2**bits, (n, k), generator=make).to(torch.uint8),
        two_levels(n, k // group, ends, count),
        group_size=group,
        offsets=offsets,
    )
    problem = weight.problem(torch.float32, "cpu", exact=exact)
    x = torch.randn(9, k, generator=make)
    small = linear.prepare(weight, problem)
    assert small.op.scale_steps and bool(small.op.offset_steps) == (offsets is not None)
    monkeypatch.setattr(linear, "in_steps", lambda values, count: None)
    large = linear.prepare(weight, problem)
    assert not large.op.scale_steps
    for m in (1, 9):
        assert torch.equal(small(x[:m]), large(x[:m]))
