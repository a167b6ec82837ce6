"""Plain rounding: error bounds, storage dtypes, zero and extreme rows."""

import pytest
import torch

from aiakq.rounding.integers import dequantize, grouped, round_activations, round_weight
from aiakq.rounding.ranges import best_clip, round_near, round_searched, searched_scales


def weight(n: int = 48, k: int = 96) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32, 96])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
def test_error_is_at_most_half_a_step(symmetric: bool, bits: int, group: int, storage: torch.dtype) -> None:
    dense = weight()
    codes, scales, zeros = round_weight(dense, bits, group, symmetric, storage)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 2**bits - 1
    assert torch.equal(scales, scales.to(storage).float())
    assert torch.equal(zeros, zeros.round())
    size = dense.shape[1] if group == -1 else group
    steps = (dequantize(codes, scales, zeros, size) - dense).abs() / scales.repeat_interleave(size, dim=1)
    # The ends of a range may lie one more rounding of the scale or of the zero point away.
    assert float(steps.max()) <= 1.01 + 2**bits * torch.finfo(storage).eps
    assert float(steps.mean()) < 0.3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 32])
def test_ranges_near_the_full_one_are_never_worse(symmetric: bool, group: int) -> None:
    dense = weight()
    size = dense.shape[1] if group == -1 else group
    full = dequantize(*round_weight(dense, 8, group, symmetric, torch.float16), size)
    near = dequantize(*round_near(dense, 8, group, symmetric, torch.float16), size)
    errors = [grouped(found - dense, size).square().sum(-1) for found in (near, full)]
    assert bool((errors[0] <= errors[1] * 1.0001).all())
    assert float(errors[0].sum()) < float(errors[1].sum())


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "gain"), [(128, 0.98), (1024, 0.99)])
def test_ranges_near_the_full_one_lower_the_error_at_8_bits(storage: torch.dtype, k: int, gain: float) -> None:
    dense = weight(256, k).to(storage).float()
    full = dequantize(*round_weight(dense, 8, -1, True, storage), k)
    near = dequantize(*round_near(dense, 8, -1, True, storage), k)
    errors = [(found - dense).square().sum(1).sqrt() for found in (near, full)]
    assert float(errors[0].sum() / errors[1].sum()) < gain
    assert bool((errors[0] <= errors[1] * 1.0001).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_constants_and_zeros(symmetric: bool) -> None:
    dense = torch.zeros(4, 32)
    dense[1] = 1e-12
    dense[2, 0] = 3.0
    dense[3] = -2.0
    codes, scales, zeros = round_weight(dense, 4, 32, symmetric, torch.float16)
    assert bool((scales > 0).all())
    got = dequantize(codes, scales, zeros, 32)
    assert torch.equal(got[0], torch.zeros(32))
    assert float((got - dense).abs().max()) <= 0.26


def test_clip_limits_the_range() -> None:
    dense = weight()
    dense[:, 0] = 1.0
    clip = torch.full((48, 1), 0.1)
    codes, scales, zeros = round_weight(dense, 4, -1, True, torch.float32, clip)
    got = dequantize(codes, scales, zeros, 96)
    assert float(got.abs().max()) < 0.11
    assert torch.allclose(got[:, 1:], dense[:, 1:].clamp(-0.1, 0.1), atol=0.2 / 15)


def test_activations_get_one_scale_per_token() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[10.0**i] for i in range(-3, 4)])
    x[3] = 0
    got = round_activations(x)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((got - x).abs() <= step / 2 + 1e-9).all())
    assert torch.equal(got[3], torch.zeros(64))


def heavy(n: int = 40, k: int = 128) -> torch.Tensor:
    """Weights a few of which are far out."""
    make = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=make) / torch.rand(n, k, generator=make).clamp(min=0.1) * 0.02


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32])
def test_searched_ranges_leave_less_error_in_every_group(symmetric: bool, bits: int, group: int) -> None:
    dense = heavy()
    size = 128 if group == -1 else group

    def losses(rounded: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return grouped(dequantize(*rounded, size) - dense, size).abs().pow(2.4).sum(-1)

    plain = round_weight(dense, bits, group, symmetric, torch.float16)
    searched = round_searched(dense, bits, group, symmetric, torch.float16)
    assert torch.equal(searched[1], searched[1].half().float())
    assert bool((losses(searched) <= losses(plain) * (1 + 1e-5)).all())
    if bits < 8:
        assert float(losses(searched).sum()) < 0.97 * float(losses(plain).sum())


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_scale_search_equals_a_search_of_the_whole_grid(symmetric: bool) -> None:
    """Against the definition, written out: every share of the range, for one group at a time, with a cost."""
    dense = heavy(n=6, k=32)
    cost = torch.linspace(0.1, 3, 32)
    scales, zeros = searched_scales(dense, 3, symmetric, torch.float32, cost)
    for row in range(6):
        low, high = float(dense[row].min().clamp(max=0)), float(dense[row].max().clamp(min=0))
        if symmetric:
            high = max(-low, high)
            low = -high
        tried = []
        for step in range(20):
            share = 1 - step / 40
            scale = torch.tensor((high - low) * share / 7)
            zero = torch.tensor(4.0) if symmetric else torch.round(-torch.tensor(low * share) / scale).clamp(0, 7)
            codes = (torch.round(dense[row] / scale) + zero).clamp(0, 7)
            tried.append((float((((codes - zero) * scale - dense[row]).square() * cost).sum()), float(scale)))
        assert float(scales[row]) == pytest.approx(min(tried)[1], rel=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_clipping_increases_the_error_of_no_group(symmetric: bool, size: int, bits: int) -> None:
    dense = heavy(n=64)
    make = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 128, generator=make) * torch.exp(torch.randn(128, generator=make))
    groups = x.unflatten(1, (-1, size)).transpose(0, 1)
    moments = groups.transpose(1, 2) @ groups

    def losses(clip: torch.Tensor | None) -> torch.Tensor:
        rounded = round_weight(dense, bits, size, symmetric, torch.float16, clip)
        gap = grouped(dequantize(*rounded, size) - dense, size).transpose(0, 1)
        return ((gap @ moments) * gap).sum(-1).T

    clip = best_clip(dense, moments, bits, size, symmetric, torch.float16)
    assert bool((losses(clip) <= losses(None) * (1 + 1e-4)).all())
    assert float(losses(clip).sum()) < 0.95 * float(losses(None).sum())
    assert bool((clip <= grouped(dense, size).abs().amax(-1) + 1e-9).all())


def test_the_scale_search_accepts_a_group_of_zeros() -> None:
    codes, scales, zeros = round_searched(torch.zeros(4, 32), 4, 32, False, torch.float16)
    assert torch.equal(dequantize(codes, scales, zeros, 32), torch.zeros(4, 32))
    assert bool((scales > 0).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_of_either_sign_are_never_worse_and_ties_are_positive(bits: int) -> None:
    dense, cost = heavy(), torch.linspace(0.1, 3, 128)

    def losses(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        scales, zeros = scales.unsqueeze(1), zeros.unsqueeze(1)
        codes = ((dense / scales).round() + zeros).clamp(0, 2**bits - 1)
        return (((codes - zeros) * scales - dense).square() * cost).sum(-1)

    positive = searched_scales(dense, bits, True, torch.float16, cost)
    signed = searched_scales(dense, bits, True, torch.float16, cost, signed=True)
    assert bool((losses(*signed) <= losses(*positive)).all())
    assert float(losses(*signed).sum()) < 0.99 * float(losses(*positive).sum())
    assert 0.2 < float((signed[0] < 0).float().mean()) < 0.8
    mirrored = searched_scales(-dense, bits, True, torch.float16, cost, signed=True)
    assert float((mirrored[0] == -signed[0]).float().mean()) > 0.8
    tied = torch.tensor([[-1.0, 1.0, 0.5, -0.5]])
    assert float(searched_scales(tied, bits, True, torch.float16, signed=True)[0]) > 0


def test_scales_stay_positive_at_8_bits_and_with_zero_points() -> None:
    for bits, symmetric in ((8, True), (4, False)):
        scales, _ = searched_scales(heavy(), bits, symmetric, torch.float16, signed=True)
        assert bool((scales > 0).all())


def test_rounding_to_nearest_with_scales_of_either_sign_leaves_less_error() -> None:
    dense = heavy()

    def error(signed: bool) -> float:
        rounded = round_searched(dense, 3, 32, True, torch.float16, signed)
        return float((dequantize(*rounded, 32) - dense).abs().pow(2.4).sum())

    assert error(True) < 0.97 * error(False)
