"""GPTQ's loop, sweeps and range search in Triton, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.kernels.triton import gptq as kernels
from aiakq.quantizers.numerics.code_grid import IntegerGrid
from aiakq.quantizers.numerics.gptq import GptqSettings, gptq
from aiakq.quantizers.numerics.gptq_block import Grid, move_columns, round_columns
from aiakq.rounding.ranges import searched_scales


@pytest.fixture
def used(monkeypatch):
    """``used(f)`` calls f with the kernels, also in the interpreter, and without; returns both results.

    Both are those of torch's loop if no kernel was launched, so this asserts that one was.
    """
    launched = []
    monkeypatch.setattr(kernels, "_available", lambda x: True)
    for name in ("round_columns", "search"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, f=function, **named: launched.append(f) or f(*args, **named))

    def both(compute):
        with monkeypatch.context() as patch:
            patch.setattr("aiakq.kernels.cpu.gptq.supports", lambda block: False)
            found = compute()
            assert launched
            patch.setattr(kernels, "_available", lambda x: False)
            return found, compute()

    return both


def problem(n: int, length: int, count: int, bits: int, device: torch.device) -> tuple[list[Tensor], Grid, list[int]]:
    """A block of columns, values, response, and a grid of groups of 8; all of them parts of larger tensors."""
    make = torch.Generator().manual_seed(n)
    k = length + 3
    block, values = torch.randn(2, k, n + 7, generator=make).to(device)[:, 3:, 2 : n + 2]
    response = (torch.randn(k, k + 2, generator=make) * 0.1 + torch.eye(k, k + 2)).to(device)[3:, 3:k]
    order = torch.randperm(k, generator=make)[:count].tolist()
    signs = torch.randint(0, 2, (-(-k // 8), n + 7), generator=make) * 2 - 1
    scales = (signs * 2.0 ** -torch.randint(bits - 2, bits + 1, signs.shape, generator=make)).to(device)
    zeros = torch.randint(0, 2**bits, signs.shape, generator=make).float().to(device)
    codes = torch.zeros(k, n + 7, dtype=torch.uint8, device=device)
    kind = IntegerGrid(bits, False, torch.float32)
    return [block, values, response], Grid(kind, *(x[:, 1 : n + 1] for x in (scales, zeros, codes))), order


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize(
    ("n", "length", "count", "bits"), [(1, 1, 1, 4), (5, 8, 3, 2), (17, 128, 20, 3), (9, 40, 40, 8)]
)
def test_columns_are_rounded_as_torch_does(used, device, n, length, count, bits, sweep):
    def done() -> list[Tensor]:
        (block, values, response), grid, order = problem(n, length, count, bits, device)
        groups = [place // 8 for place in order]
        if sweep:
            move_columns(block, response, grid, groups, order, values, [0.5 + 0.01 * i for i in range(count)])
        else:
            round_columns(block, response, grid, groups, order)
        return [block, values, grid.codes]

    found, wanted = used(done)
    # Where a weight lies in the middle between two codes, a last bit decides, and what follows differs; few do.
    same = (found[2] == wanted[2]).all(0)
    assert int((~same).sum()) <= 1 + n // 20
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours[:, same].float(), theirs[:, same].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "symmetric", "bits", "storage"),
    [
        ((37, 64), True, 4, torch.float16),
        ((5, 2, 16), True, 2, torch.bfloat16),
        ((5, 2, 16), False, 3, torch.bfloat16),
        ((3, 200), True, 8, torch.float32),
        ((3, 40), False, 4, torch.float16),
    ],
    ids=str,
)
def test_ranges_are_those_that_torch_finds(used, device, shape, symmetric, bits, storage):
    make = torch.Generator().manual_seed(0)
    groups, cost = torch.randn(shape, generator=make), torch.rand(shape[1:], generator=make) + 0.1
    groups[0], groups[1] = 0, groups[1] * 1e-9
    # Columns of a matrix of which a row is contiguous, as in the loop.
    groups = groups.movedim(0, -1).contiguous().movedim(-1, 0).to(device)

    def done() -> tuple[Tensor, Tensor]:
        return searched_scales(groups, bits, symmetric, storage, cost.to(device), signed=True)

    found, wanted = used(done)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape == shape[:-1]
        # Two ranges may lose the same but for the order of the sum.
        assert (ours != theirs).float().mean() <= (0.02 if device.type == "cuda" else 0)


@pytest.mark.parametrize("order", ["none", "group", "static"])
def test_the_whole_of_gptq_loses_no_more_than_with_torch(used, device, order):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(300, 48, generator=make) @ (torch.randn(48, 48, generator=make) / 7 + torch.eye(48))
    weight, hessian = torch.randn(16, 48, generator=make).to(device), (x.T @ x / 300).to(device)
    settings = GptqSettings(IntegerGrid(3, True, torch.float16, signed=True), 16, order, sweeps=1, refit=True)

    def loss() -> float:
        made = gptq(weight, hessian, settings)
        values = (made.codes.float() - 4) * made.scales.repeat_interleave(16, 1)
        return float((((values - weight) @ hessian) * (values - weight)).sum())

    found, wanted = used(loss)
    assert abs(found / wanted - 1) < 0.005


def test_what_is_not_supported_stays_with_torch(monkeypatch):
    monkeypatch.setattr(kernels, "_available", lambda x: True)
    assert kernels.supports(torch.zeros(128, 16)) and not kernels.supports(torch.zeros(129, 16))
    assert not kernels.supports(torch.zeros(16, 8).T)
    assert kernels.searches(torch.zeros(4, 8), torch.float16)
    assert not kernels.searches(torch.zeros(4, 8), torch.float64)
    assert not kernels.searches(torch.zeros(2, 2, 4, 8), torch.float16)
    monkeypatch.undo()
    assert not kernels.supports(torch.zeros(8, 16))  # on a CPU
    with pytest.raises(ValueError, match="not contiguous"):
        block = torch.zeros(16, 8).T
        kernels.round_columns(block, torch.eye(8), 4, block, block, block, [0], [0])
