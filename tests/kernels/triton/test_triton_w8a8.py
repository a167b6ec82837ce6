"""8-bit weights and activations: codes that are torch's, products of integers that are exact."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.triton import configs, linear_int8
from aiakq.kernels.triton.configs import Config
from aiakq.kernels.types import QWeight

CONFIGS = {
    "weights_left": Config(64, 16, 4, 2, 1, weights_left=True),
    "weights_left_shared": Config(64, 16, 4, 2, 3, weights_left=True),
    "rows_left": Config(64, 32, 4, 2, 1),
    "rows_left_shared": Config(32, 16, 4, 2, 4),
}


def weight(n, k, bias=False, given=False) -> QWeight:
    draw = torch.Generator().manual_seed(n + k)
    return QWeight(
        scheme="w8a8",
        codes=torch.randint(1, 256, (n, k), generator=draw).to(torch.uint8),
        scales=(torch.rand(n, 1, generator=draw) - 0.5) / 50,
        bias=torch.randn(n, generator=draw) if bias else None,
        group_size=k,
        input_scale=torch.tensor(0.02) if given else None,
    )


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_those_of_torch(dtype, given, device):
    x = (torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    x[2] = 0
    scale = torch.tensor([0.02]) if given else None
    codes, scales = linear_int8.quantize(x.to(device), None if scale is None else scale.to(device))
    wanted = x.float().abs().amax(1) / 127 if scale is None else scale.expand(6)
    assert torch.allclose(scales.cpu(), wanted.clamp_min(1.2e-38), rtol=1e-6)
    steps = (x.float() / scales.cpu()[:, None]).round().clamp(-128, 127)
    assert torch.equal(codes.cpu().float(), steps)


def test_what_is_not_finite_shows_in_its_row_only(device):
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    w = weight(64, 64)
    y = linear_int8.prepare(w.to(device), w.problem(torch.float32, device.type))(x.to(device))
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("m", "n"), [(1, 64), (5, 70), (33, 130)])
def test_products_are_exact(name, m, n, device):
    w = weight(n, 160, bias=True)
    state = linear_int8.prepare(w.to(device), w.problem(torch.float32, device.type))
    x = torch.randn(m, 160, generator=torch.Generator().manual_seed(m)).to(device)
    codes, scales = linear_int8.quantize(x, None)
    y = linear_int8.multiply(codes, scales, state, torch.float32, CONFIGS[name]).cpu()
    whole = codes.cpu().long() @ (w.codes.long() - 128).T
    wanted = whole.float() * scales.cpu()[:, None] * w.scales.view(1, -1) + w.bias
    assert torch.allclose(y, wanted, rtol=1e-6, atol=1e-5)
    assert not configs.counters(device, 1).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_w8a8_layer_matches_quantized_activations(dtype, device, close):
    for given in (False, True):
        w = weight(100, 128, bias=True, given=given)
        state = linear_int8.prepare(w.to(device), w.problem(dtype, device.type))
        x = torch.randn(20, 256, generator=torch.Generator().manual_seed(2)).to(dtype)[:, 64:192]
        scale = w.input_scale if given else x.float().abs().amax(1, keepdim=True) / 127
        codes = (x.float() / scale).round().clamp(-128, 127)
        wanted = (codes.double() * scale) @ ((w.codes.double() - 128) * w.scales).T + w.bias
        close(state(x.to(device)).cpu(), wanted)
    assert state(x[:0].to(device)).shape == (0, 100)
