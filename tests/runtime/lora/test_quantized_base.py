"""Adapters changed with their base, by the formulas alone: in float64 nothing differs but the last digits."""

from __future__ import annotations

import pytest
import torch

from aiakq.formats.folded_scales import LinearScales
from aiakq.runtime.lora.adapter_folder import LoraWeights
from aiakq.runtime.lora.quantized_base import dora_factors, fits, fitted

N, K, RANK = 6, 8, 3
WIDTHS = {"intermediate_size": (K, 12)}


def adapter(**parts: bool) -> LoraWeights:
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(RANK, K, generator=draw), torch.randn(N, RANK, generator=draw)
    bias = torch.randn(N, generator=draw) if parts.get("bias") else None
    magnitude = torch.rand(N, generator=draw) + 1 if parts.get("magnitude") else None
    return LoraWeights(1.5, a, b, bias, magnitude)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("parts", [{}, {"bias": True}, {"magnitude": True}], ids=str)
def test_outputs_are_those_of_the_original_divided_by_the_factors(columns, rows, parts):
    torch.manual_seed(0)
    scales = LinearScales(torch.rand(K) + 0.2 if columns else None, torch.rand(N) + 0.2 if rows else None)
    weight, x, lora = torch.randn(N, K), torch.randn(5, K), adapter(**parts)
    c, r = (torch.ones(1) if each is None else each for each in (scales.columns, scales.rows))
    folded = weight * c / r[:, None] if rows else weight * c
    torch.testing.assert_close(scales.unfolded(folded), weight)
    found = fitted(lora, scales, N, K, {}, "x")

    def output(weight, x, lora, factors):
        added = lora.scale * (x @ lora.a.T @ lora.b.T)
        added = added if lora.bias is None else added + lora.scale * lora.bias
        return (x @ weight.T + added) * factors

    factors = [torch.ones(N)] * 2
    if parts.get("magnitude"):
        factors = [dora_factors(weight, lora), dora_factors(folded, found, scales)]
        torch.testing.assert_close(*factors)
    expected = output(weight, x, lora, factors[0]) / r
    torch.testing.assert_close(output(folded, x / c, found, factors[1]), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_were_padded_get_zeros_and_no_scaled_rows():
    lora = adapter(magnitude=True)
    scales = LinearScales(torch.full((12,), 2.0))
    found = fitted(lora, scales, N, 12, WIDTHS, "mlp.down_proj")
    assert torch.equal(found.a[:, :K], 2 * lora.a) and not found.a[:, K:].any()
    turned = LoraWeights(1.0, torch.ones(RANK, N), torch.ones(K, RANK), None, torch.ones(K))
    found = fitted(turned, LinearScales(), 12, N, WIDTHS, "mlp.up_proj")
    assert not found.b[K:].any() and torch.equal(found.b[:K], turned.b)
    weight = torch.cat([torch.ones(K, N), torch.zeros(12 - K, N)])
    assert dora_factors(weight, found)[K:].tolist() == [1.0] * (12 - K)


def test_nothing_is_changed_or_rounded_without_factors():
    lora = adapter(bias=True)
    assert fitted(lora, LinearScales(), N, K, {}, "x") == lora
    halves = LoraWeights(1.0, lora.a.half(), lora.b.half())
    assert fitted(halves, LinearScales(), N, K, {}, "x").a.dtype == torch.float16
    scaled = fitted(halves, LinearScales(rows=torch.ones(N)), N, K, {}, "x")
    assert scaled.a.dtype == scaled.b.dtype == torch.float32


def test_sizes_fit_where_a_padding_leads_from_one_to_the_other():
    assert fits((N, K), (N, K), {}, "x") and fits((N, K), (N, 12), WIDTHS, "x")
    assert not fits((N, K), (N, 13), WIDTHS, "x") and not fits((N, K), (N, 12), {}, "x")
    assert fits((2 * K, N), (24, N), WIDTHS, "mlp.gate_up_proj") and not fits((2 * K, N), (24, N), WIDTHS, "mlp.fc1")
