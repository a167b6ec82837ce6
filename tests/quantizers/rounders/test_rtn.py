"""Round-to-nearest with searched ranges: where scales of either sign are chosen, and what they gain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


@pytest.fixture
def rounded(tiny_model, tmp_path) -> Callable[..., Path]:
    """``rounded(rounder, bits, **options)`` -> the folder of a tiny model, by a recipe."""

    def make(rounder: str, bits: int, **given: object) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"rounder: {rounder}\nbits: {bits}\ngroup_size: 32\n")
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        source = str(tiny_model("LlamaForCausalLM"))
        fields = {"input": source, "output": str(output), "evaluate": False, "device": "cpu", **given}
        quantize_checkpoint(QuantizeOptions.from_recipe(path, **fields))
        return output

    return make


def scales(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint.open(folder)
    return torch.cat([checkpoint.read_linear(name).scales.flatten() for name in checkpoint.quantized_linears()])


def error(folder: Path, source: Path) -> float:
    written, original = Checkpoint.open(folder), Checkpoint.open(source)
    pairs = [(written.read_linear(name), original.tensor(f"{name}.weight")) for name in written.quantized_linears()]
    return sum(float((dequantize(weight) - wanted.float()).square().sum()) for weight, wanted in pairs)


def test_half_of_the_searched_scales_are_negative_and_the_error_is_smaller(rounded, tiny_model):
    source = tiny_model("LlamaForCausalLM")
    signed = rounded("{name: rtn, scale_search: mse}", 3)
    positive = rounded("{name: rtn, scale_search: mse, signed: false}", 3)
    assert 0.3 < float((scales(signed) < 0).float().mean()) < 0.7
    assert bool((scales(positive) > 0).all())
    assert error(signed, source) < 0.97 * error(positive, source)


@pytest.mark.parametrize(
    ("search", "bits", "more"), [("mse", 8, {}), ("minmax", 3, {}), ("mse", 4, {"symmetric": False})]
)
def test_other_scales_are_positive(search, bits, more, rounded):
    assert bool((scales(rounded(f"{{name: rtn, scale_search: {search}}}", bits, **more)) > 0).all())


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 300, (24, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def calibrated(tiny_model, tmp_path, ids) -> Callable[..., Path]:
    """``calibrated(method, family, **options)`` -> the folder of a tiny model, calibrated on ``ids``."""

    def make(method: str, family: str = "LlamaForCausalLM", **given: object) -> Path:
        file = tmp_path / "ids.txt"
        file.write_text("\n".join(" ".join(map(str, row)) for row in ids.tolist()))
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        quantize_checkpoint(
            QuantizeOptions(
                str(tiny_model(family)), str(output), method, token_ids=file, evaluate=False, device="cpu", **given
            )
        )
        return output

    return make


def output_error(folder: Path, source: Path, ids: torch.Tensor) -> float:
    found, wanted = (load_for_scoring(path, "float32", "cpu").logits(ids) for path in (folder, source))
    return float((found - wanted).square().mean())


def test_targets_of_the_original_model_bring_outputs_nearer_to_it(calibrated, tiny_model, ids):
    own, original = (calibrated("weight_only_int8", targets=targets) for targets in ("own", "original"))
    source = tiny_model("LlamaForCausalLM")
    assert output_error(original, source, ids) < 0.97 * output_error(own, source, ids)


def test_targets_of_the_original_model_with_experts_and_several_workers(calibrated):
    """The same bytes from any number of workers; they are the default of awq."""
    files = [
        (calibrated("awq", "Qwen2MoeForCausalLM", group_size=32, **given) / "model.safetensors").read_bytes()
        for given in ({"targets": "original"}, {"targets": "original", "workers": 2}, {}, {"targets": "own"})
    ]
    assert files[0] == files[1] == files[2] != files[3]
