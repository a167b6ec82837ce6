"""The native inner loop of GPTQ, on every instruction set, against torch and against each other."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import gptq as feedback
from aiakq.quantizers.numerics import gptq_block as columns
from aiakq.quantizers.numerics.code_grid import IntegerGrid
from aiakq.quantizers.numerics.gptq_block import Grid, move_columns, round_columns


class Problem:
    """A block of ``length`` columns of ``n`` weights in groups of 8, views of larger tensors, of which ``count`` count.

    ``seen``: after a call, everything that was written.
    """

    def __init__(self, n: int, length: int, count: int, bits: int) -> None:
        make = torch.Generator().manual_seed(1000 * n + length)
        self.count, k = count, length + 3
        self.block = torch.randn(k, n + 7, generator=make)[3:, 2 : n + 2]
        self.values = torch.randn(k, n + 7, generator=make)[3:, 2 : n + 2]
        self.response = (torch.randn(k, k + 2, generator=make) * 0.1 + torch.eye(k, k + 2))[3:, 3:k]
        self.order = torch.randperm(k, generator=make)[:count].tolist()
        groups = -(-k // 8)
        signs = torch.randint(0, 2, (groups, n + 7), generator=make) * 2 - 1
        scales = signs * 2.0 ** -torch.randint(bits - 2, bits + 1, (groups, n + 7), generator=make)
        zeros = torch.randint(0, 2**bits, (groups, n + 7), generator=make).float()
        codes = torch.zeros(k, n + 7, dtype=torch.uint8)
        self.grid = Grid(
            IntegerGrid(bits, False, torch.float32), *(tensor[:, 1 : n + 1] for tensor in (scales, zeros, codes))
        )
        self.groups = [place // 8 for place in self.order]

    def rounded(self) -> Problem:
        round_columns(self.block, self.response, self.grid, self.groups, self.order)
        return self

    def moved(self) -> Problem:
        steps = [0.5 + 0.01 * i for i in range(self.count)]
        move_columns(self.block, self.response, self.grid, self.groups, self.order, self.values, steps)
        return self

    @property
    def seen(self) -> list[torch.Tensor]:
        return [self.block, self.values, self.grid.codes]


SHAPES = [(1, 1, 1), (5, 8, 3), (16, 128, 128), (31, 40, 40), (64, 128, 96), (97, 127, 64)]


@pytest.mark.parametrize("way", ["plain", "moves"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch(isa, monkeypatch, shape, bits, way):
    def done() -> list[torch.Tensor]:
        made = Problem(*shape, bits)
        return (made.moved() if way == "moves" else made.rounded()).seen

    assert feedback.supports(Problem(*shape, bits).block)
    found = done()
    monkeypatch.setattr(columns.native, "supports", lambda block: False)
    wanted = done()
    # Where a weight lies in the middle between two codes, a last bit decides, and what follows differs; few do.
    same = (found[2] == wanted[2]).all(0)
    assert same.float().mean() > 0.9 or int((~same).sum()) <= 1
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one[:, same[: one.shape[1]]].float(), other[:, same].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(isa, native, shape):
    def done() -> list[torch.Tensor]:
        return [*Problem(*shape, 3).rounded().seen, *Problem(*shape, 3).moved().seen]

    here = done()
    native.use_isa("portable")
    assert all(map(torch.equal, here, done()))


def test_unsupported_blocks_are_refused():
    assert not feedback.supports(torch.zeros(129, 16))
    assert not feedback.supports(torch.zeros(8, 16, dtype=torch.float64))
    assert not feedback.supports(torch.zeros(16, 8).T)
    made = Problem(16, 8, 8, 4)
    with pytest.raises(ValueError, match="different distances"):
        feedback.round_columns(made.block, made.response, 4, *made.grid[1:3], torch.zeros(8, 16), made.groups, range(8))
