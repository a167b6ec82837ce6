"""Scales of blocks of floats: the number that the scales of a linear have in common is kept."""

from __future__ import annotations

import math

import pytest
import torch

from aiakq.formats import compressed_tensors, modelopt, quantization_config
from aiakq.formats.block_scales import as_e4m3

UNIT = 0.00125
SMALL = torch.tensor([[0.5, 3.0, 7.0, 14.0]])


@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_unit_that_is_given_is_taken_however_small_the_scales_are(reciprocal):
    wanted = SMALL / torch.tensor(1 / UNIT)
    codes, unit = as_e4m3(wanted, reciprocal, 1 / UNIT)
    assert torch.equal(codes.float(), SMALL)
    assert math.isclose(float(unit), 1 / UNIT if reciprocal else UNIT, rel_tol=1e-6)
    assert float(as_e4m3(wanted, reciprocal)[0].float().max()) == 448


def test_a_unit_that_does_not_fit_is_replaced():
    codes, unit = as_e4m3(SMALL, True, 0.123)
    assert torch.equal(codes.float() / unit, SMALL)


def test_linears_with_a_common_unit_keep_it_in_another_format():
    """vLLM takes one for linears that it joins."""
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    spec = quantization_config.read(config)
    target = quantization_config.read(compressed_tensors.to_config(spec))
    for scales in (SMALL, 2 * SMALL):
        tensors = {
            "weight": torch.full((1, 32), 0x21, dtype=torch.uint8),
            "weight_scale": scales.to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(UNIT),
        }
        written = compressed_tensors.write(modelopt.read(tensors, spec), target, torch.float32)
        assert math.isclose(float(written["weight_global_scale"]), 1 / UNIT, rel_tol=1e-6)
