"""Grids of small floats: full ranges give the weights of compressed-tensors, and the search only lowers the error."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.numerics.float_grids import Float4Grid, Float8Grid, round_on_grid
from aiakq.quantizers.numerics.gptq import GptqSettings, GptqSolver, gptq


def weight() -> Tensor:
    make = torch.Generator().manual_seed(0)
    return torch.randn(48, 256, generator=make) * 0.05 * torch.exp(torch.randn(48, 1, generator=make))


UNIT = float(448 * 6 / weight().abs().max())
#: name -> (a grid, its group size).
GRIDS: dict[str, tuple[Any, int]] = {
    "fp8": (Float8Grid, -1),
    "mxfp4": (Float4Grid, 32),
    "nvfp4": (lambda searched=False: Float4Grid(UNIT, searched), 16),
}


def values(grid: Any, codes: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return grid.units(codes, wide) * wide


@pytest.mark.parametrize(("name", "preset"), [("fp8", "FP8_DYNAMIC"), ("mxfp4", "MXFP4A16"), ("nvfp4", "NVFP4A16")])
def test_full_ranges_give_the_weights_of_compressed_tensors(name: str, preset: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams

    make, size = GRIDS[name]
    arguments = PRESET_SCHEMES[preset]["weights"]
    w = weight()
    groups = w.unflatten(1, (-1, w.shape[1] if size == -1 else size))
    unit = torch.tensor([UNIT]) if name == "nvfp4" else None
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, global_scale=unit)
    wanted = fake_quantize(w, scales, zeros, arguments, global_scale=unit)
    grid = make()
    codes, found, _ = round_on_grid(w, grid, size)
    assert torch.equal(values(grid, codes, found), wanted)


@pytest.mark.parametrize("name", GRIDS)
def test_the_search_lowers_the_error_and_keeps_to_what_can_be_stored(name: str) -> None:
    make, size = GRIDS[name]
    w, errors = weight(), []
    for searched in (False, True):
        grid = make(searched=searched)
        codes, scales, _ = round_on_grid(w, grid, size)
        assert torch.equal(grid.stored(scales), scales)
        errors.append((values(grid, codes, scales) - w).square().unflatten(1, (scales.shape[1], -1)).sum(-1))
    assert bool((errors[1] <= errors[0]).all())
    assert float(errors[1].sum()) < {"fp8": 0.99, "mxfp4": 1.0, "nvfp4": 0.9}[name] * float(errors[0].sum())


@pytest.mark.parametrize("name", GRIDS)
def test_a_code_is_the_nearest_of_its_own_value(name: str) -> None:
    grid = GRIDS[name][0]()
    codes = torch.arange(16 if "4" in name else 0x7F, dtype=torch.uint8)
    one, none = torch.ones(()), torch.zeros(())
    assert torch.equal(grid.codes(grid.units(codes, none), one, none), codes.float())


@pytest.mark.parametrize("name", GRIDS)
def test_groups_of_zeros_and_tiny_weights_have_scales_that_can_be_stored(name: str) -> None:
    make, size = GRIDS[name]
    w = torch.zeros(2, 64)
    w[1] = 1e-9
    grid = make(searched=True)
    codes, scales, _ = round_on_grid(w, grid, size)
    assert bool((scales > 0).all()) and bool(torch.isfinite(values(grid, codes, scales)).all())
    assert not bool(values(grid, codes, scales)[0].any())


def test_a_scale_is_stored_as_the_nearest_power_of_two() -> None:
    assert Float4Grid().stored(torch.tensor([1.0, 1.49, 1.51, 2.9, 0.7])).tolist() == [1, 1, 2, 2, 0.5]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("order", ["group", "static"])
def test_gptq_has_a_lower_output_error_than_nearest(name: str, order: str) -> None:
    make, size = GRIDS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 256, generator=generator) @ (torch.randn(256, 256, generator=generator) / 16 + torch.eye(256))
    hessian, w, grid = x.T @ x / len(x), weight(), make(searched=True)

    def loss(codes: Tensor, scales: Tensor) -> float:
        gap = values(grid, codes, scales) - w
        return float(((gap @ hessian) * gap).sum())

    plain = loss(*round_on_grid(w, grid, size)[:2])
    found = gptq(w, hessian, GptqSettings(grid, size, order, sweeps=2, refit=name != "fp8"))
    assert torch.equal(grid.stored(found.scales), found.scales)
    assert loss(found.codes, found.scales) < 0.8 * plain


def test_fixed_scales_are_kept_by_the_loop() -> None:
    w, grid = weight(), Float8Grid()
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    fixed = torch.full((48, 2), 0.002)
    settings = GptqSettings(grid, 128, "group", sweeps=1)
    assert torch.equal(GptqSolver(x.T @ x, settings).round(w, fixed=fixed).scales, fixed)
    assert torch.equal(GptqSolver(torch.full((256, 256), torch.nan), settings).round(w, fixed=fixed).scales, fixed)
