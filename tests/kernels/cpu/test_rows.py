"""Native norms, activations and embeddings against float64, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from aiakq.kernels.cpu.activation import NativeActivation
from aiakq.kernels.cpu.embedding import NativeEmbedding
from aiakq.kernels.cpu.library import load_library
from aiakq.kernels.cpu.norm import NativeNorm
from aiakq.kernels.cpu.scaling import NativeScaling
from aiakq.kernels.ops.activation import TorchActivation, prepare
from aiakq.kernels.ops.scaling import TorchScaling
from aiakq.kernels.types import ActivationProblem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Relative to the largest value of a row or to 1: rounding of the result.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
WIDTHS = (1, 3, 15, 16, 17, 64, 100, 2049)
FUNCTIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}


@pytest.fixture(autouse=True)
def _each_set(isa):
    """Every test here runs on every instruction set."""


def close(found: torch.Tensor, wanted: torch.Tensor, times: float = 1) -> None:
    assert found.isfinite().all()
    error = (found.double() - wanted).abs().amax(-1) / wanted.abs().amax(-1).clamp_min(1.0)
    assert error.max() < times * ROUNDING[found.dtype]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are further apart."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), math.nan, dtype=x.dtype)
    wide[..., 2:-3] = x
    return wide[..., 2:-3]


def rms_norm(weight: torch.Tensor, eps: float) -> NativeNorm:
    return NativeNorm(weight, None, eps, centered=False)


def layer_norm(weight: torch.Tensor, bias: torch.Tensor, eps: float) -> NativeNorm:
    return NativeNorm(weight, bias, eps, centered=True)


def normalized(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight.double(), bias.double(), eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
def test_norms_match_float64(dtype, d):
    torch.manual_seed(d)
    weight, bias = torch.randn(d).to(dtype), torch.randn(d).to(dtype)
    x = (torch.randn(7, d) * 3 + 1).to(dtype)
    residual = torch.randn(7, d).to(dtype)
    for norm, shift in ((rms_norm(weight, 1e-5), None), (layer_norm(weight, bias, 1e-5), bias)):
        close(norm(x), normalized(x, 1e-5, weight, shift))
        assert torch.equal(norm(strided(x)), norm(x))
        total = x + residual
        for make in (torch.clone, strided):
            changed = make(x)
            assert torch.equal(norm(changed, make(residual)), norm(total))
            assert torch.equal(changed, total), "the residual is added in place"


def test_norms_of_heads_and_of_non_contiguous_views():
    norm = rms_norm(torch.randn(8), 1e-6)
    x = torch.randn(5, 3, 8)
    assert torch.equal(norm(x), norm(x.view(15, 8)).view(5, 3, 8))
    part = torch.randn(5, 5, 8)[:, 1:4]
    assert torch.equal(norm(part), norm(part.contiguous()))
    turned = torch.randn(8, 6).t()
    added = turned.clone(memory_format=torch.preserve_format)
    assert torch.equal(norm(added, torch.ones(6, 8)), norm(turned + 1)) and torch.equal(added, turned + 1)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
def test_gated_activations_match_float64(name, dtype, columns):
    torch.manual_seed(columns)
    act = NativeActivation(name)
    both = (torch.randn(5, 2 * columns) * 4).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    alone = FUNCTIONS[name](gate.double())
    close(act(gate), alone)
    close(act.gated(both), alone * up.double())
    assert torch.equal(act.gated(strided(both)), act.gated(both))
    assert torch.equal(act(strided(gate)), act(gate))
    assert torch.equal(act(gate[:, None]), act(gate)[:, None])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_accurate_over_their_whole_range(name):
    x = torch.cat([torch.linspace(-12, 12, 40_001), torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4])])
    act = NativeActivation(name)
    wanted = FUNCTIONS[name](x.double())
    # Squares are larger than what the others return.
    error = (act(x[None])[0].double() - wanted).abs() / (wanted.abs() / x.abs()).clamp_min(1)
    assert (error <= 1e-6 + 2e-7 * x.abs()).all() and error[:40_001].max() < 3e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_in_their_row(bad):
    x = torch.randn(4, 37)
    broken = x.clone()
    broken[2, 33] = bad
    norm = rms_norm(torch.ones(37), 1e-6)
    layer = layer_norm(torch.ones(37), torch.zeros(37), 1e-6)
    for call in (norm, layer, *(NativeActivation(name) for name in ("silu", "gelu", "gelu_tanh", "relu2", "sigmoid"))):
        found = call(broken)
        assert torch.equal(found[[0, 1, 3]], call(x)[[0, 1, 3]])
        assert not found[2, 33].isfinite() or (math.isinf(bad) and found[2, 33].round() in (0, 1))
    assert not norm(broken)[2].isfinite().all() and layer(broken)[2].isnan().all()
    assert NativeActivation("relu")(broken)[2, 33].isnan() == math.isnan(bad)


@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 16, 31, 70])
def test_embeddings_are_read_from_plain_tables_and_from_tiles(table, dtype, d):
    weight = torch.randn(75, d).to(table)
    ids = torch.tensor([0, 74, 33, 33, 5, 31, 32])
    wanted = weight[ids].to(dtype)
    assert torch.equal(NativeEmbedding(weight, 75, d, False, dtype)(ids), wanted)
    pairs = table == torch.bfloat16
    tiles = torch.empty(3, d + d % 2 if pairs else d, 32, dtype=table)
    load_library().cdll.aiakq_pack_floats(weight.data_ptr(), 75, d, weight.element_size(), pairs, tiles.data_ptr(), 1)
    tiled = NativeEmbedding(tiles, 75, d, True, dtype)
    assert torch.equal(tiled(ids), wanted)
    outside = tiled(torch.tensor([-1, 75, 2]))
    assert outside[:2].isnan().all() and torch.equal(outside[2], weight[2].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows_or_on_threads(dtype, threads):
    x = torch.randn(600, 262).to(dtype)
    norm, act = rms_norm(torch.randn(262), 1e-6), NativeActivation("silu")
    for call in (norm, act, act.gated):
        threads(1)
        alone = torch.cat([call(x[:1]), call(x[:3])[1:]])
        threads(3)
        assert torch.equal(call(x)[:3], alone)
    assert call(x[:0]).shape == (0, 131)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_clamped_swiglu_is_that_of_gpt_oss(width, dtype):
    gate, up = (4 * torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    clamped, other = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    wanted = (other + 1) * clamped * torch.sigmoid(1.702 * clamped)
    close(NativeActivation("clamped_swiglu").gated(torch.cat((gate, up), dim=1)), wanted)
    reference = prepare(ActivationProblem("clamped_swiglu", dtype, "cpu"))
    assert isinstance(reference, TorchActivation)
    found = reference.gated(torch.cat((gate, up), dim=1))
    assert (found.double() - wanted).abs().max() < 30 * ROUNDING[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_scaling_caps_and_adds_and_is_rounded_once(width, dtype):
    x, added = (8 * torch.randn(5, width, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    x, added = strided(x.to(dtype)), strided(added.to(dtype))
    factors, positions = torch.rand(9, generator=torch.Generator().manual_seed(3)), torch.tensor([8, 0, 3, 3, 1])
    for scale, cap, by_position in ((1.0, None, False), (0.37, None, True), (2.0, 5.0, False), (1.0, 30.0, True)):
        wanted = x.double() * scale * (factors[positions].double()[:, None] if by_position else 1)
        wanted = wanted if cap is None else cap * torch.tanh(wanted / cap)
        for make in (NativeScaling, TorchScaling):
            layer = make(scale, cap, factors if by_position else None)
            at = positions if by_position else None
            close(layer(x, positions=at), wanted, 3)
            close(layer(x, added, positions=at), wanted + added.double(), 3)
            target = strided(torch.zeros(5, width, dtype=dtype))
            assert layer(x, added, positions=at, out=target) is target
            close(target, wanted + added.double(), 3)
    inplace = x.clone()
    NativeScaling(1.0, None, None)(inplace, added, out=inplace)
    close(inplace, x.double() + added.double())


def test_scaling_keeps_what_is_not_finite_and_refuses_positions_beyond_its_factors():
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1e30]])
    capped = NativeScaling(1.0, 5.0, None)(x)[0]
    assert capped[0].isnan() and capped[1:].tolist() == [5.0, -5.0, 5.0]
    beyond = NativeScaling(1.0, None, torch.ones(3))(torch.ones(2, 4), positions=torch.tensor([2, 3]))
    assert beyond[0].isfinite().all() and beyond[1].isnan().all()
    with pytest.raises(ValueError, match="rows"):
        NativeScaling(1.0, None, None)(torch.ones(2, 4), torch.ones(2, 3))
