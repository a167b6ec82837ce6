"""The sweeps, the refit of scales, and targets beside the weights themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.numerics.code_grid import CodeGrid, IntegerGrid
from aiakq.quantizers.numerics.gptq import GptqSettings, gptq
from aiakq.quantizers.numerics.gptq_block import Grid
from aiakq.quantizers.numerics.sweeps import Descent


def problem(k: int = 384, n: int = 48, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, the second moment of inputs that are correlated and of unequal size, and a shift."""
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=make) / k**0.5 + torch.eye(k)
    x = torch.randn(4 * k, k, generator=make) @ mix * torch.exp(torch.randn(k, generator=make))
    gap = 0.05 * torch.randn(4 * k, n, generator=make) + x @ (0.003 * torch.randn(k, n, generator=make))
    return torch.randn(n, k, generator=make) * 0.05, x.T @ x / len(x), gap.T @ x / len(x)


def damped(hessian: Tensor, damp: float = 0.01) -> Tensor:
    return hessian.double() + damp * hessian.diagonal().double().mean() * torch.eye(len(hessian))


def values(grid: CodeGrid, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    size = codes.shape[1] // scales.shape[1]
    wide = [tensor.repeat_interleave(size, 1) for tensor in (scales, zeros)]
    return (grid.units(codes, wide[1]) * wide[0]).double()


def loss(weight: Tensor, rounded: Tensor, hessian: Tensor, shift: Tensor | None = None) -> float:
    """What is minimized, up to a constant: ``tr(Q H Q^T - 2 Q (W H + S)^T)``, the constant that of the own targets."""
    gap = rounded - weight.double()
    own = float(((gap @ hessian) * gap).sum())
    return own if shift is None else own - 2 * float((gap * shift.double()).sum())


def settings(grid: CodeGrid | None = None, group_size: int = 64, **fields: Any) -> GptqSettings:
    return GptqSettings(grid or IntegerGrid(3, True, torch.float16), group_size, **fields)


class TableGrid:
    """The values of a table (E2M1, a 4-bit float) times a scale; the range search tries fractions of the largest."""

    integer_bits = None
    table = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = groups.abs().amax(-1).clamp(min=1e-6) / 6
        zeros = torch.zeros_like(largest)
        tried = [self.stored(largest * fraction) for fraction in ((1.0,) if cost is None else (1.0, 0.9, 0.8, 0.7))]
        losses = []
        for scales in tried:
            gap = (
                self.units(self.codes(groups, scales[..., None], zeros[..., None]), zeros) * scales[..., None] - groups
            )
            losses.append((gap.square() * (1 if cost is None else cost)).sum(-1))
        best = torch.stack(losses).argmin(0, keepdim=True)
        return torch.stack(tried).gather(0, best)[0], zeros

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        borders = (self.table[1:] + self.table[:-1]) / 2
        return torch.bucketize((values / scales).contiguous(), borders).float()

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        return self.table[codes.long()]

    def stored(self, scales: Tensor) -> Tensor:
        return scales.half().float()


@pytest.mark.parametrize("group", [-1, 32, 96, 128, 192])
@pytest.mark.parametrize("order", ["none", "static", "group"])
def test_a_shift_has_the_loss_of_rounding_the_target(group: int, order: str) -> None:
    """Merged into the loop it gives what the explicit target ``W + S (H + l)^-1`` gives, up to last bits."""
    weight, hessian, shift = problem()
    exact = damped(hessian)
    target = (weight.double() + shift.double() @ torch.linalg.inv(exact)).float()
    given = settings(group_size=group, order=order, sweeps=1)
    explicit, merged = gptq(target, hessian, given), gptq(weight, hessian, given, shift=shift)
    losses = [
        loss(weight, values(given.grid, each.codes, each.scales, each.zeros), exact, shift)
        for each in (explicit, merged, gptq(weight, hessian, given))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2, abs=2e-3 * abs(losses[2]))
    assert losses[1] < losses[2] - 0.1 * abs(losses[2])


@pytest.mark.parametrize("order", ["none", "group"])
def test_a_drift_is_the_shift_of_all_weights(order: str) -> None:
    weight, hessian, _ = problem()
    drift = 0.05 * torch.randn(384, 384, generator=torch.Generator().manual_seed(1)) @ hessian / 384**0.5
    given = settings(order=order, sweeps=1)
    one = gptq(weight, hessian, given, drift=drift)
    other = gptq(weight, hessian, given, shift=weight @ drift)
    assert float((one.codes == other.codes).float().mean()) > 0.98
    halves = gptq(weight, hessian, given, drift=drift / 2, shift=weight @ drift / 2)
    assert float((halves.codes == other.codes).float().mean()) > 0.98


def test_a_shift_of_zero_changes_no_code() -> None:
    weight, hessian, shift = problem()
    one = gptq(weight, hessian, settings(sweeps=2), shift=torch.zeros_like(shift))
    assert torch.equal(one.codes, gptq(weight, hessian, settings(sweeps=2)).codes)


GRIDS = {
    **{f"{bits} bits": IntegerGrid(bits, True, torch.float16, signed=True) for bits in (2, 3, 4, 8)},
    "zero points": IntegerGrid(3, False, torch.float16),
    "table": TableGrid(),
}


@pytest.mark.parametrize("group", [-1, 32, 96, 128, 192])
@pytest.mark.parametrize("order", ["static", "group"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_refitted_scales_lower_the_loss(grid: CodeGrid, order: str, group: int) -> None:
    weight, hessian, shift = problem()
    found = []
    for refit in (False, True):
        given = settings(grid, group, order=order, sweeps=2, refit=refit)
        result = gptq(weight, hessian, given, shift=shift)
        assert torch.equal(result.scales, grid.stored(result.scales))
        rounded = values(grid, result.codes, result.scales, result.zeros)
        target = weight.double() + shift.double() @ torch.linalg.inv(damped(hessian))
        found.append(loss(target, rounded, damped(hessian)))
    assert found[1] < 0.998 * found[0]


@pytest.mark.parametrize("group", [-1, 32, 96, 128, 192])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_no_step_increases_the_loss(grid: CodeGrid, group: int) -> None:
    weight, hessian, _ = problem()
    hessian[7] = 0
    hessian[:, 7] = 0  # an input that never fires
    exact = damped(hessian)
    start = gptq(weight, hessian, settings(grid, group))
    codes, scales, zeros = (tensor.T.contiguous() for tensor in (start.codes, start.scales, start.zeros))
    state = Grid(grid, scales, zeros, codes)

    def now() -> Tensor:
        gap = values(grid, codes.T, scales.T, zeros.T) - weight.double()
        gap[:, 7] = 0
        return ((gap @ exact) * gap).sum(1)

    def gradient() -> Tensor:
        return (exact @ (weight.double() - values(grid, codes.T, scales.T, zeros.T)).T).float()

    damping = float(hessian.diagonal().mean()) * 0.01
    descent = Descent(state, gradient(), hessian, damping)
    losses = [now()]
    for _ in range(3):
        descent.sweep(refit=True, last=False)
        losses.append(now())
    alive = [column for column in range(384) if column != 7]
    assert torch.allclose(descent.gradient[alive], gradient()[alive], atol=2e-4 * float(gradient().abs().max()))
    descent.refit_scales()
    losses.append(now())
    for before, after in zip(losses, losses[1:], strict=False):
        assert bool((after <= before * (1 + 1e-5)).all())
    assert float(losses[-1].sum()) < 0.999 * float(losses[0].sum())


def test_the_last_refit_is_the_minimum_over_all_scales() -> None:
    weight, hessian, _ = problem(k=256, n=6)
    grid = IntegerGrid(3, True, torch.float32, signed=True)
    result = gptq(weight, hessian, settings(grid, 32, sweeps=2, refit=True))
    exact, units = damped(hessian), grid.units(result.codes, torch.tensor(4.0)).double()
    for row in range(6):
        spread = torch.zeros(256, 8, dtype=torch.float64)
        for group in range(8):
            spread[group * 32 : group * 32 + 32, group] = units[row, group * 32 : group * 32 + 32]
        wanted = torch.linalg.solve(spread.T @ exact @ spread, spread.T @ exact @ weight[row].double())
        assert torch.allclose(result.scales[row].double(), wanted, rtol=1e-3)


def test_a_refit_keeps_the_scales_of_zeros_and_their_signs() -> None:
    weight, hessian, shift = problem(k=256)
    weight[3] = 0
    weight[5, 64:128] = 0
    grid = IntegerGrid(4, True, torch.float16, signed=False)
    result = gptq(weight, hessian, settings(grid, 64, sweeps=2, refit=True), shift=20 * shift[:, :256])
    assert bool(torch.isfinite(result.scales).all()) and bool((result.scales > 0).all())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_refit_has_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    weight, hessian, shift = problem(n=67)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = gptq(weight, hessian, settings(group_size=32, sweeps=2, refit=True), shift=shift)
        torch.set_num_threads(1)
        wanted = gptq(weight, hessian, settings(group_size=32, sweeps=2, refit=True), shift=shift)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scales, wanted.scales)
