"""Options: what is refused before anything heavy is loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.quantizers import METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.transforms.smooth_quant import SmoothQuant


def options(method: str = "gptq", **fields: Any) -> QuantizeOptions:
    return QuantizeOptions("in", "out", method, **fields)


def test_every_method_is_a_recipe() -> None:
    parts = {name: [part.name for part in options(name).resolved_recipe.parts] for name in METHODS}
    assert parts == {
        "weight_only_int8": ["rtn"],
        "smooth_quant": ["smooth_quant", "rtn"],
        "awq": ["awq", "rtn"],
        "gptq": ["gptq"],
        "fp8": ["rtn"],
        "mxfp4": ["rtn"],
        "nvfp4": ["rtn"],
        "gguf": ["gptq_blocks"],
    }


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "nvfp4"])
def test_floats_are_rounded_by_gptq_where_calibration_is_given(method: str) -> None:
    def rounder(**fields: Any) -> str:
        return options(method, **fields).resolved_recipe.rounder.name

    assert rounder() == "rtn"
    assert rounder(calibration="text.txt") == rounder(token_ids="ids.txt") == rounder(gptq=True) == "gptq"
    assert rounder(calibration="text.txt", gptq=False) == "rtn"
    solved = options(method, gptq=True).resolved_recipe.rounder
    assert solved.targets == ("own" if method == "fp8" else "original")  # type: ignore[attr-defined]


def test_awq_aims_at_the_original_model_below_8_bits(tmp_path: Path) -> None:
    def targets(*recipe: str, **fields: Any) -> str:
        file = tmp_path / "recipe.yaml"
        file.write_text("\n".join(recipe))
        chosen = QuantizeOptions.from_recipe(file, input="in", output="out") if recipe else options("awq", **fields)
        return chosen.resolved_recipe.rounder.targets  # type: ignore[attr-defined,no-any-return]

    assert targets() == targets(bits=4, symmetric=True) == targets("quant_type: awq") == "original"
    assert targets(bits=8) == targets(targets="own") == targets("quant_type: awq", "bits: 8") == "own"
    assert targets(bits=8, targets="original") == "original"
    # A rounder that a recipe names has its own defaults, so that recipes of earlier reports repeat their runs.
    assert targets("quant_type: awq", "rounder: {name: rtn}") == "own"


def test_options_import_nothing_heavy() -> None:
    script = "import sys, aiakq.quantizers.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_alternative_spellings_of_methods_are_accepted() -> None:
    assert options("gpt").method == "gptq"
    assert options("W8A8").method == "smooth_quant"
    assert [options(name).method for name in ("FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")] == ["fp8", "nvfp4", "mxfp4"]


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ({"method": "exl2"}, "bad_option"),
        ({"tp": 0}, "bad_option"),
        ({"dtype": "int8"}, "bad_option"),
        ({"bits": 5}, "bad_option"),
        ({"method": "awq", "bits": 3}, "bad_option"),
        ({"group_size": 0}, "bad_option"),
        ({"group_size": -2}, "bad_option"),
        ({"samples": 0}, "bad_option"),
        ({"seqlen": 1}, "bad_option"),
        ({"damp": 0.0}, "bad_option"),
        ({"damp": float("nan")}, "bad_option"),
        ({"act_order": "yes"}, "bad_option"),
        ({"method": "smooth_quant", "smooth_alpha": 1.5}, "bad_option"),
        ({"method": "smooth_quant", "smooth_alpha": float("nan")}, "bad_option"),
        ({"method": "awq", "act_order": "static"}, "option_conflict"),
        ({"method": "smooth_quant", "group_size": 128}, "option_conflict"),
        ({"method": "smooth_quant", "symmetric": False}, "option_conflict"),
        ({"method": "smooth_quant", "smooth_alpha": "much"}, "bad_option"),
        ({"scale_search": "grid"}, "bad_option"),
        ({"activation_bits": 8}, "option_conflict"),
        ({"method": "smooth_quant", "activation_bits": 16}, "option_conflict"),
        ({"method": "fp8", "activation_bits": 4}, "option_conflict"),
        ({"method": "mxfp4", "activation_bits": 8}, "option_conflict"),
        ({"method": "nvfp4", "activation_bits": 8}, "option_conflict"),
        ({"method": "fp8", "activation_bits": 16, "activation_scales": "tensor"}, "option_conflict"),
        ({"method": "nvfp4", "activation_bits": 4, "activation_scales": "tensor"}, "option_conflict"),
        ({"method": "fp8", "group_size": 64}, "option_conflict"),
        ({"method": "fp8", "group_size": 128, "activation_scales": "tensor"}, "option_conflict"),
        ({"method": "mxfp4", "group_size": 16}, "option_conflict"),
        ({"method": "mxfp4", "symmetric": False}, "option_conflict"),
        ({"method": "mxfp4", "sweeps": 2}, "option_conflict"),
        ({"method": "mxfp4", "gptaq": True}, "option_conflict"),
        ({"method": "mxfp4", "awq_scaling": True}, "option_conflict"),
        ({"method": "nvfp4", "tune": "8steps"}, "option_conflict"),
        ({"method": "nvfp4", "target_bpw": 4.5}, "option_conflict"),
        ({"importance": "much"}, "bad_option"),
        ({"method": "awq", "importance": "gradient"}, "option_conflict"),
        ({"method": "awq", "importance": "gradient-rows"}, "option_conflict"),
        ({"method": "gguf", "importance": "gradient-rows"}, "bad_option"),
        ({"method": "nvfp4", "gptq": True, "importance": "gradient-rows"}, "option_conflict"),
        ({"method": "smooth_quant", "gptq": True, "importance": "gradient-rows"}, "option_conflict"),
        ({"awq_scaling": True, "importance": "gradient-rows"}, "option_conflict"),
        ({"method": "smooth_quant", "importance": "gradient"}, "option_conflict"),
        ({"tune": 0}, "bad_option"),
        ({"tune": -5}, "bad_option"),
        ({"tune": "0steps"}, "bad_option"),
        ({"tune": 1e9}, "bad_option"),
        ({"tune": "nan"}, "bad_option"),
        ({"method": "smooth_quant", "gptq": True, "gptaq": True}, "option_conflict"),
        ({"tune": "ten minutes"}, "bad_option"),
        ({"tune": float("inf")}, "bad_option"),
        ({"method": "smooth_quant", "tune": 60}, "option_conflict"),
        ({"tune": 60, "max_kl": 0.1}, "option_conflict"),
        ({"method": "smooth_quant", "activation_scales": "channel"}, "bad_option"),
        ({"activation_scales": "tensor"}, "option_conflict"),
        ({"method": "awq", "gptaq": True}, "option_conflict"),
        ({"method": "awq", "sweeps": 1}, "option_conflict"),
        ({"sweeps": -1}, "bad_option"),
        ({"method": "smooth_quant", "awq_scaling": True}, "option_conflict"),
        ({"method": "awq", "gptq": True}, "option_conflict"),
        ({"gptq": False}, "option_conflict"),
        ({"gptq": False, "bits": 8}, "option_conflict"),
        ({"token_ids": "ids.txt", "calibration": "text.txt"}, "option_conflict"),
    ],
)
def test_impossible_options(fields: dict[str, Any], id: str) -> None:
    with pytest.raises(AiakqError) as caught:
        options(**fields)
    assert caught.value.id == id
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_the_hint_for_the_importance_of_rows_names_one_that_floats_have(method: str) -> None:
    with pytest.raises(AiakqError, match="--gptq and --importance gradient,") as caught:
        options(method, importance="gradient-rows")
    with pytest.raises(AiakqError, match="floats have importance gradient"):
        options(method, gptq=True, importance="gradient-rows")
    assert options(method, gptq=True, importance="gradient").resolved_recipe.rounder.name == "gptq"
    assert caught.value.id == "option_conflict"


def alpha(model_type: str, **fields: Any) -> float | str | None:
    found = options("smooth_quant", **fields).resolved_recipe.for_model(model_type).transforms[0]
    assert isinstance(found, SmoothQuant)
    return found.alpha


def test_the_strength_of_smoothing_is_that_of_the_family_unless_given() -> None:
    assert alpha("llama") == 0.8
    assert alpha("opt") == 0.5
    assert alpha("opt", smooth_alpha=0.0) == 0.0  # 0 is a value, not "unset"
    assert options("smooth_quant", smooth_alpha="0.5").smooth_alpha == 0.5  # as the command line passes it
    assert alpha("opt", smooth_alpha="auto") == "auto"
    assert alpha("glm") == alpha("glm130") == 0.75


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((600, "600s"), ("600", "600s"), (0.5, "0.5s"), ("48steps", "48steps"), ("1 step", "1steps")),
        *(
            (1_000_000, "1000000s"),
            ("1234567.125", "1234567.125s"),
            (999_999_999, "999999999s"),
            (0.001, "0.001s"),
            ("1e3", "1000s"),
        ),
    ],
)
def test_a_tuning_budget_is_a_number_of_seconds_or_steps(given: object, kept: str) -> None:
    assert options(tune=given).tune == kept
    assert options(tune=kept).tune == kept


def test_a_refusal_names_the_option_to_use() -> None:
    with pytest.raises(AiakqError, match=r"--gptaq cannot be combined with --gptq.* Use --targets original"):
        options("smooth_quant", gptq=True, gptaq=True)
    with pytest.raises(AiakqError, match="Use -quant_type smooth_quant, or leave it away"):
        options("gptq", gptq=True)


def test_the_steps_of_a_tuning_are_the_same_in_every_attempt() -> None:
    assert options(tune="8steps", max_kl=0.1).tune == "8steps"


def test_weights_of_tokens_are_a_parameter_of_gptq() -> None:
    assert not options().resolved_recipe.weighs_tokens
    assert not options(importance="none").resolved_recipe.weighs_tokens
    assert options(importance="gradient").resolved_recipe.weighs_tokens
    assert not options(importance="gradient").resolved_recipe.weighs_rows
    rows = options(importance="gradient-rows").resolved_recipe
    assert rows.weighs_rows and not rows.weighs_tokens
    assert options("smooth_quant", gptq=True, importance="gradient").resolved_recipe.weighs_tokens
    assert not options("awq", importance="none").resolved_recipe.weighs_tokens


def test_awq_of_8_bits_is_symmetric_by_default() -> None:
    assert not options("awq").spec("1").symmetric
    assert options("awq", bits=8).spec("1").symmetric
    assert not options("awq", bits=8, symmetric=False).spec("1").symmetric


def test_stored_activation_scales_are_in_the_spec() -> None:
    spec = options("smooth_quant", activation_scales="tensor").spec("1")
    assert spec.static_input
    assert spec.layer.static_input


def test_formats_of_the_methods() -> None:
    specs = {name: options(name).spec("1") for name in METHODS}
    assert {name: (spec.format, spec.describe()) for name, spec in specs.items()} == {
        "weight_only_int8": ("compressed-tensors", "w8a16 channel sym"),
        "smooth_quant": ("compressed-tensors", "w8a8 channel sym"),
        "awq": ("awq", "w4a16 g128 asym"),
        "gptq": ("gptq", "w4a16 g128 sym"),
        "fp8": ("compressed-tensors", "fp8a8 channel"),
        "mxfp4": ("compressed-tensors", "lut4a16 g32 e2m1 e8m0"),
        "nvfp4": ("compressed-tensors", "lut4a16 g16 e2m1 e4m3"),
        "gguf": ("gguf", "w4a16 g32 asym"),
    }
    assert options("gptq", symmetric=False).spec("1").format == "gptq_v2"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"smooth_alpha": 0.5}, "-sq has no effect with -quant_type gptq"),
        ({"eval_text": "text.txt", "evaluate": False}, "--eval-text has no effect with --no-eval"),
        ({"input": ".", "revision": "main"}, "--revision has no effect: the input is a folder"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend has no effect without --workers"),
    ],
)
def test_options_without_an_effect_are_named(fields: dict[str, Any], says: str) -> None:
    (sentence,) = QuantizeOptions(**{"input": "in", "output": "out", "method": "gptq", **fields}).warnings
    assert sentence.startswith(says)
    assert not QuantizeOptions("in", "out", "gptq", eval_text="text.txt", revision="main").warnings
