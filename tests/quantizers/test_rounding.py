"""Plain rounding: error bounds, storage dtypes, zero and extreme rows."""

import pytest
import torch

from aiakq.quantizers.rounding import dequantize, round_activations, round_weight


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
def test_rows_without_range(symmetric: bool) -> None:
    dense = torch.zeros(4, 32)
    dense[1] = 1e-12
    dense[2, 0] = 3.0
    dense[3] = -2.0
    codes, scales, zeros = round_weight(dense, 4, 32, symmetric, torch.float16)
    assert bool((scales > 0).all())
    got = dequantize(codes, scales, zeros, 32)
    assert torch.equal(got[0], torch.zeros(32))
    assert float((got - dense).abs().max()) <= 0.26


def test_limits_cut_the_range() -> None:
    dense = weight()
    dense[:, 0] = 1.0
    limits = torch.full((48, 1), 0.1)
    codes, scales, zeros = round_weight(dense, 4, -1, True, torch.float32, limits)
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
