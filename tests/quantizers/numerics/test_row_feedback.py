"""Feedback along rows: less of the loss that it is for, and nothing where it has no meaning."""

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.numerics import row_feedback
from aiakq.quantizers.numerics.code_grid import IntegerGrid
from aiakq.quantizers.numerics.gptq import GptqResult, GptqSettings, GptqSolver
from aiakq.quantizers.numerics.row_feedback import round_with_rows, row_factor

N, K = 96, 64
GRID = IntegerGrid(2, True, torch.float16, signed=True)


def moment(size: int, seed: int) -> Tensor:
    """The second moment of correlated samples."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * size, size, generator=make) @ (torch.randn(size, size, generator=make) + torch.eye(size))
    return x.T @ x / len(x)


def solver(order: str = "group", drift: Tensor | None = None) -> GptqSolver:
    return GptqSolver(moment(K, 0), GptqSettings(GRID, 32, order, sweeps=2, refit=True), drift)


def weight(seed: int = 1) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.1


def loss(found: GptqSolver, result: GptqResult, target: Tensor, factor: Tensor) -> float:
    gap = target - found.values(result)
    return float((factor @ gap @ found.hessian * gap).sum())


@pytest.mark.parametrize("order", ["group", "none", "static"])
def test_feedback_lowers_the_loss_in_which_outputs_count_together(order: str) -> None:
    found, factor = solver(order), moment(N, 2)
    results = found.round(weight()), round_with_rows(found, weight(), None, factor)
    plain, fed = (loss(found, result, weight(), factor) for result in results)
    assert fed < 0.8 * plain
    assert loss(found, results[1], weight(), torch.eye(N)) > loss(found, results[0], weight(), torch.eye(N))


def test_outputs_that_count_alone_are_rounded_as_without() -> None:
    found, factor = solver(), torch.diag(torch.rand(N, generator=torch.Generator().manual_seed(3)) + 0.1)
    plain, fed = found.round(weight()), round_with_rows(found, weight(), None, factor)
    assert torch.equal(plain.codes, fed.codes) and torch.equal(plain.scales, fed.scales)


def test_targets_are_those_of_the_shift_and_the_drift() -> None:
    make = torch.Generator().manual_seed(4)
    drift, shift = torch.randn(K, K, generator=make) * 0.1, torch.randn(N, K, generator=make) * 0.1
    found = solver(drift=drift)
    damped = found.hessian + 0.01 * found.hessian.diagonal().mean() * torch.eye(K)
    wanted = weight() + torch.linalg.solve(damped, (weight() @ drift + shift).T).T
    torch.testing.assert_close(found.target(weight(), shift), wanted, rtol=1e-3, atol=1e-4)
    assert torch.equal(solver().target(weight(), None), weight())
    fed = round_with_rows(found, weight(), shift, torch.eye(N))
    plain = found.round(weight(), shift)
    assert float((fed.codes == plain.codes).float().mean()) > 0.99


def test_no_gradient_is_no_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.arange(N)
    assert row_factor(torch.zeros(N, N), order) is None
    assert row_factor(torch.full((N, N), float("nan")), order) is None
    found = solver()
    assert torch.equal(round_with_rows(found, weight(), None, torch.zeros(N, N)).codes, found.round(weight()).codes)
    broken = GptqSolver(torch.full((K, K), float("nan")), found.settings)
    assert round_with_rows(broken, weight(), None, moment(N, 2)).damp is None
    monkeypatch.setattr(row_feedback, "ROWS", N)  # one block, in which there is no feedback
    assert torch.equal(round_with_rows(found, weight(), None, moment(N, 2)).codes, found.round(weight()).codes)
