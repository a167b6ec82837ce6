"""Native linear layers with floating-point weights, against float64, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops import Ops, batched
from aiakq.kernels.types import BatchedProblem

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: (M, N, K): one of everything, odd ones, more rows than are worked on side by side.
SHAPES = [(1, 1, 1), (3, 33, 31), (13, 100, 65), (27, 31, 128), (2, 64, 200), (5, 7, 257)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", TOLERANCE, ids=str)
def test_every_dtype_of_weights_and_activations_matches_float64(isa, stored):
    for m, n, k in SHAPES:
        weight, bias = random(n, k, seed=n).to(stored), random(n, seed=k)
        for dtype, tolerance in TOLERANCE.items():
            x = random(m, k, seed=m).to(dtype)
            for added in (None, bias):
                y = Ops(torch.device("cpu"), dtype).dense(weight, added)(x)
                wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
                size = (x.double().abs() @ weight.double().abs().T).norm(dim=1) / k**0.5 + wanted.norm(dim=1)
                assert y.shape == (m, n) and y.dtype == dtype
                assert ((y.double() - wanted).norm(dim=1) / size <= tolerance).all(), (m, n, k, dtype)


def test_sums_of_whole_numbers_are_exact(isa):
    """Whole numbers, whose sums need no rounding: equal, not only close."""
    x = torch.randint(-50, 50, (13, 77), generator=torch.Generator().manual_seed(1)).float()
    weight = torch.randint(-50, 50, (45, 77), generator=torch.Generator().manual_seed(2)).float()
    for stored in TOLERANCE:
        assert torch.equal(Ops(torch.device("cpu"), torch.float32).dense(weight.to(stored))(x), x @ weight.T)


@pytest.mark.parametrize("stored", TOLERANCE, ids=str)
def test_a_row_does_not_depend_on_the_other_rows(isa, stored):
    for k in (64, 101):
        layer = Ops(torch.device("cpu"), torch.float32).dense(random(70, k).to(stored))
        x = random(41, k, seed=2)
        together = layer(x)
        for count in (*range(1, 14), 16, 25):
            rows = torch.randperm(41, generator=torch.Generator().manual_seed(count))[:count]
            assert torch.equal(layer(x[rows].contiguous()), together[rows]), (k, count)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_non_finite_values_stay_in_their_row(isa, value):
    for stored in TOLERANCE:
        layer = Ops(torch.device("cpu"), torch.float32).dense(random(40, 65).to(stored))
        x = random(15, 65, seed=5)
        clean = layer(x)
        x[3, 60] = value
        y, others = layer(x), [i for i in range(15) if i != 3]
        assert torch.equal(y[others], clean[others])
        assert not y[3].isfinite().any()


def test_rows_of_any_stride_and_nothing_written_outside_the_output(isa, apply):
    for stored in TOLERANCE:
        for dtype in TOLERANCE:
            for n, k in ((33, 71), (64, 72)):
                layer = Ops(torch.device("cpu"), dtype).dense(random(n, k).to(stored), random(n, seed=1))
                x = random(14, k, seed=2).to(dtype)
                wide = torch.full((14, k + 9), float("nan"), dtype=dtype)
                wide[:, 3 : k + 3] = x
                plain = apply(layer, x.float(), torch.empty(14, n))
                canvas = torch.full((16, n + 5), 77.0, dtype=dtype)
                apply(layer, wide[:, 3 : k + 3], canvas[1:15, 2 : n + 2])
                assert torch.equal(canvas[1:15, 2 : n + 2], plain.to(dtype))
                canvas[1:15, 2 : n + 2] = 77.0
                assert (canvas == 77.0).all(), "written outside the output"


@pytest.mark.parametrize("stored", TOLERANCE, ids=str)
def test_batches_multiply_columns_of_their_own_with_weights_of_their_own(isa, stored):
    for batch, n, k in ((1, 5, 7), (3, 64, 40), (5, 33, 17)):
        weight = random(batch, n, k, seed=n).to(stored)
        for dtype, tolerance in TOLERANCE.items():
            x = random(13, batch, k + 3, seed=k).to(dtype)[..., 2 : k + 2]
            canvas = torch.full((14, batch + 1, n + 5), 77.0, dtype=dtype)
            layer = Ops(torch.device("cpu"), dtype).batched(weight)
            y = layer(x, canvas[:13, :batch, 4 : n + 4])
            wanted = torch.einsum("mbk,bnk->mbn", x.double(), weight.double())
            size = torch.einsum("mbk,bnk->mbn", x.double().abs(), weight.double().abs()).norm(dim=2) / k**0.5
            assert ((y.double() - wanted).norm(dim=2) / (size + wanted.norm(dim=2)) <= tolerance).all(), (n, k, dtype)
            assert torch.equal(layer(x[4:5]), y[4:5]), "a row depends on the others"
            canvas[:13, :batch, 4 : n + 4] = 77.0
            assert (canvas == 77.0).all(), "written outside the output"
            reference = batched.prepare(weight, BatchedProblem(batch, n, k, stored, dtype, "cpu"))
            assert ((reference(x).double() - wanted).norm(dim=2) / (size + wanted.norm(dim=2)) <= tolerance).all()
    with pytest.raises(ValueError, match="where"):
        layer(x[..., 1:])


def test_any_number_of_threads_gives_the_same_bits(isa, threads):
    x = random(19, 129, seed=9)
    for stored in TOLERANCE:
        layer = Ops(torch.device("cpu"), torch.float32).dense(random(500, 129).to(stored))
        found = []
        for count in (1, 2, 3, 4):
            threads(count)
            found.append(layer(x))
        assert all(torch.equal(one, found[0]) for one in found)


def test_outputs_round_like_torch_at_the_limits_of_their_dtype(isa, apply):
    """Rounding of float16 and bfloat16 is torch's: ties, what underflows, what overflows."""
    values = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 3 * 2**-26, 6.1e-5, 5.97e-8, 65504, 65519.9, 65520, 1e-30, 1e30]
        + [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 3.39e38, -0.0, 1e-40, float("inf")]
    )
    one = Ops(torch.device("cpu"), torch.float32).dense(torch.ones(1, 1))
    for dtype in (torch.float16, torch.bfloat16):
        wanted = values.to(dtype)
        for sign in (1, -1):
            y = apply(one, sign * values.unsqueeze(1), torch.empty(len(values), 1, dtype=dtype))
            assert torch.equal(y[:, 0], sign * wanted), dtype
            assert torch.equal(one(y), y)  # and read from its type again
