"""Norms, activation functions, rotary positions and the cache's writes in Triton, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from aiakq.kernels.ops.rotary import apply_rotary, rotary_factors
from aiakq.kernels.triton import linear_fp8, linear_int8
from aiakq.kernels.triton.activation import TritonActivation
from aiakq.kernels.triton.activation_kernel import gate_kernel
from aiakq.kernels.triton.layouts import Float8Layout, QuantizedLayout
from aiakq.kernels.triton.norm import TritonNorm
from aiakq.kernels.triton.norm_kernel import norm_kernel
from aiakq.kernels.triton.rotary_kernel import rotary_kernel
from aiakq.kernels.types import LARGEST, InputRounding, RotaryTables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Of keys and values as they are stored.
EXACTNESS = {None: 1e-3, torch.int8: 1e-2, torch.float8_e4m3fn: 0.035, torch.float8_e5m2: 0.07}
NAN = float("nan")


def normal(*shape, dtype, device, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_its_residual(dtype, centered, device, close):
    wide = normal(5, 300, dtype=dtype, device=device)
    residual, weight, bias = (
        normal(*s, dtype=dtype, device=device, seed=n) for n, s in ((2, (5, 100)), (3, (100,)), (4, (100,)))
    )
    x = wide[:, 100:200]
    before = wide.clone()
    summed = x.double() + residual.double()
    if dtype != torch.float32 and device.type == "cuda":
        summed = summed.to(dtype).double()
    y = torch.full((5, 100), NAN, dtype=dtype, device=device)
    norm_kernel[(5,)](
        x, residual, weight, bias, y, y, y, 300, 100, 100, 1e-5,
        D=100, BLOCK=128, RESIDUAL=True, CENTERED=centered, BIAS=centered, CODES=False, GIVEN=False,
    )  # fmt: skip
    if centered:
        wanted = F.layer_norm(summed, (100,), weight.double(), bias.double(), 1e-5)
    else:
        wanted = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    close(y, wanted)
    close(x, summed)
    assert torch.equal(wide[:, :100], before[:, :100]) and torch.equal(wide[:, 200:], before[:, 200:])


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_functions_match_torch(dtype, number, device, close):
    functions = [F.silu, lambda x: F.gelu(x, approximate="tanh"), F.gelu, F.relu]
    functions += [lambda x: F.relu(x).square(), lambda x: x * torch.sigmoid(1.702 * x), torch.sigmoid]
    function = functions[number]
    both = normal(3, 200, dtype=dtype, device=device)
    gate, up = both[:, :100], both[:, 100:]
    for with_up in (True, False):
        y = torch.full((3, 100), NAN, dtype=dtype, device=device)
        gate_kernel[(3, 2)](
            gate, up, y, y, y, 200, 200, 100,
            D=100, BLOCK=64, ACTIVATION=number, UP=with_up, CODES=False, GIVEN=False,
        )  # fmt: skip
        close(y, function(gate.double()) * (up.double() if with_up else 1))


@pytest.mark.parametrize("given", [False, True])
def test_activations_are_quantized_where_they_are_computed(given, device):
    """Rounded once, from float32: not first to the activations' dtype."""
    both = normal(3, 200, dtype=torch.float16, device=device)
    wanted = F.silu(both[:, :100].double()) * both[:, 100:].double()
    codes = torch.full((3, 100), 99, dtype=torch.int8, device=device)
    scales, stored = torch.full((3,), NAN, device=device), torch.tensor([0.03], device=device)
    gate_kernel[(3, 1)](
        both, both[:, 100:], codes, scales, stored, 200, 200, 100,
        D=100, BLOCK=128, ACTIVATION=0, UP=True, CODES=True, GIVEN=given,
    )  # fmt: skip
    if given:
        assert (scales == 0.03).all()
    else:
        assert torch.allclose(scales.double(), wanted.abs().amax(1) / 127, rtol=1e-5)
    steps = (wanted / scales.double()[:, None]).clamp(-128, 127)
    assert (codes.double() - steps).abs().max() < 0.501


@pytest.mark.parametrize("given", [None, 0.03])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_activations_quantize_like_the_next_layer(dtype, given, device):
    """The codes are those of the rows as floats, but for what is not rounded twice now."""
    x, residual, up = (normal(5, 96, dtype=dtype, device=device, seed=n) for n in range(3))
    weight = normal(96, dtype=dtype, device=device, seed=9)
    quantized = QuantizedLayout(None if given is None else torch.tensor([given], device=device))
    rms, layer = TritonNorm(weight, None, 1e-5, False), TritonNorm(weight, weight, 1e-5, True)
    for make in (
        lambda layout: rms(x.clone(), residual, layout),
        lambda layout: layer(x.clone(), None, layout),
        lambda layout: TritonActivation("silu").gated(torch.cat((x, up), dim=1), layout),
        lambda layout: TritonActivation("gelu")(x, layout),
    ):
        found, floats = make(quantized), make(None)
        codes, scales = linear_int8.quantize(floats, quantized.input_scale)
        assert found.dtype == dtype and found.codes.dtype == torch.int8
        assert torch.allclose(found.scales, scales, rtol=0 if given else 1e-2)
        assert (found.codes.int() - codes.int()).abs().max() <= 1


@pytest.mark.parametrize(("group", "given"), [(0, None), (0, 0.03), (128, None)], ids=["fp8", "fp8-given", "fp8-group"])
def test_norms_and_activations_round_to_e4m3_like_the_next_layer(group, given, device):
    """But for what is not rounded twice now: codes are neighbors at most. 1280 columns of an activation function have
    several programs.
    """
    dtype, width = torch.bfloat16, 1280
    x, residual, up = (normal(5, width, dtype=dtype, device=device, seed=n) for n in range(3))
    weight = normal(width, dtype=dtype, device=device, seed=9)
    scale = None if given is None else torch.tensor([given], device=device)
    rounded = Float8Layout(scale, group, InputRounding(group, powers_of_two=group > 0))
    rms, layer = TritonNorm(weight, None, 1e-5, False), TritonNorm(weight, weight, 1e-5, True)
    for make in (
        lambda layout: rms(x.clone(), residual, layout),
        lambda layout: layer(x.clone(), None, layout),
        lambda layout: TritonActivation("silu").gated(torch.cat((x, up), dim=1), layout),
        lambda layout: TritonActivation("gelu")(x, layout),
    ):
        found, wanted = make(rounded), linear_fp8.quantize(make(None), rounded)
        assert found.dtype == dtype and found.codes.dtype == torch.float8_e4m3fn
        assert found.scales.shape == wanted.scales.shape == (width // group if group else 1, 5)
        ours, theirs = (
            each.codes.float() * each.scales.T.repeat_interleave(group or width, dim=1) for each in (found, wanted)
        )
        # Neighbors are up to an eighth apart, and those of the least numbers a step of these.
        assert torch.isclose(ours, theirs, rtol=0.13, atol=2**-9 * wanted.scales.max().item()).all()
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rotated", "norm", "stored"),
    [
        (24, 0, None),
        (16, 1, torch.int8),
        (24, 1, None),
        (16, 2, None),
        (24, 2, torch.int8),
        (0, 2, None),
        (0, 0, torch.int8),
        (24, 0, torch.float8_e4m3fn),
        (24, 0, torch.float8_e5m2),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
def test_rotary_and_cache(rotated, norm, stored, interleaved, dtype, device, close):
    T, H, kv, D = 4, 3, 2, 24
    qkv = normal(T, (H + 2 * kv) * D, dtype=dtype, device=device)
    before = qkv.clone().double().cpu()
    positions, slots = torch.tensor([0, 5, 2, 7]), torch.tensor([3, 0, 9, 5])
    freqs = torch.randn(8, rotated // 2, generator=torch.Generator().manual_seed(3))
    cosines, sines = freqs.cos(), freqs.sin()
    q_norm, k_norm = (normal(D, dtype=dtype, device=device, seed=n) for n in (4, 5))
    caches = [torch.zeros(12, kv, D, dtype=stored or dtype, device=device) for _ in range(2)]
    scales = [torch.zeros(12, kv, device=device) for _ in range(2)]
    # Queries that stay as they are have no programs.
    turning = H if rotated or norm else 0
    rotary_kernel[(T, turning + kv)](
        qkv, qkv[:, H * D :], qkv[:, (H + kv) * D :], q_norm, k_norm, cosines.to(device), sines.to(device),
        positions.to(device), slots.to(device), *caches, *scales, *[qkv.stride(0)] * 3, 1e-6,
        H=turning, HKV=kv, D=D, DV=D, WIDTH=32, WIDTH_Q=32, ROTATED=rotated, INTERLEAVED=interleaved, NORM=norm,
        SCALED=stored is not None,
    )  # fmt: skip

    def normed(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double().cpu()

    def turned(x, weight):
        if norm == 1:
            x = normed(x, weight)
        if rotated:
            tables = RotaryTables(cosines, sines, interleaved)
            x = apply_rotary(x, rotary_factors(tables, positions, torch.float64), interleaved)
        return normed(x, weight) if norm == 2 else x

    q, k, v = (part.view(T, -1, D) for part in before.split((H * D, kv * D, kv * D), 1))
    tolerance = 2e-3 if norm and dtype == torch.float16 else None
    close(qkv[:, : H * D].cpu().view(T, H, D), turned(q, q_norm), tolerance)
    assert torch.equal(qkv[:, H * D :].double().cpu(), before[:, H * D :])
    live = slots > 0
    for cache, scale, wanted in zip(caches, scales, (turned(k, k_norm), v), strict=True):
        found = cache.float()[slots[live].to(device)]
        if stored is not None:
            assert torch.allclose(
                scale[slots[live].to(device)].cpu().double(), wanted[live].abs().amax(-1) / LARGEST[stored], 1e-3
            )
            found = found * scale[slots[live].to(device)][..., None]
        close(found.cpu(), wanted[live], EXACTNESS[stored])
        untouched = torch.ones(12, dtype=torch.bool)
        untouched[slots[live]] = False
        assert not cache.float()[untouched.to(device)].any(), "nothing is written for padding"
