"""Learned rotations are orthogonal, have fewer outliers than random ones, and are the same on any number of threads."""

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.rotation.learned import learned_rotation
from aiakq.quantizers.rotation.orthogonal import random_hadamard


def rows() -> Tensor:
    """Rows of weights with a few large singular directions, which no fixed rotation spreads best."""
    make = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=make))[0]
    scales = torch.ones(32)
    scales[:4] = 6.0
    return torch.randn(600, 32, generator=make) * scales @ basis


def fourth_power(x: Tensor) -> float:
    return float(x.pow(4).mean())


@pytest.mark.parametrize("keeps_ones", [False, True])
def test_a_learned_rotation_lowers_the_fourth_power_below_that_of_its_start(keeps_ones: bool) -> None:
    start = random_hadamard(32, torch.Generator().manual_seed(0), keeps_ones).apply(torch.eye(32))
    found = learned_rotation(rows(), start, keeps_ones)
    assert torch.allclose(found @ found.T, torch.eye(32), atol=1e-5)
    assert fourth_power(rows() @ found) < 0.9 * fourth_power(rows() @ start)
    if keeps_ones:
        assert torch.allclose(torch.ones(32) @ found, torch.ones(32), atol=1e-5)


def test_the_bits_of_a_learned_rotation_do_not_depend_on_the_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(learned_rotation(rows().repeat(4, 1), torch.eye(32), steps=8))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_rows_of_zeros_keep_the_start() -> None:
    assert torch.equal(learned_rotation(torch.zeros(8, 4), torch.eye(4)), torch.eye(4))
