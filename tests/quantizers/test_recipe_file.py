"""Recipe files: equal to flags, named in errors, and reproducible byte for byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aiakq.errors import AiakqError
from aiakq.quantizers import METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.recipe_file import read_recipe
from aiakq.quantizers.rounders.gptq import Gptq
from aiakq.quantizers.run_report import REPORT_FILE
from aiakq.quantizers.transforms.awq import Awq

QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def options(path: Path, **given: Any) -> QuantizeOptions:
    return QuantizeOptions.from_recipe(path, **{"input": "in", "output": "out", **given})


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("weight_only_int8", {}),
        ("smooth_quant", {}),
        ("awq", {"group_size": 32, "skip": ("*o_proj",), "seed": 3}),
        ("gptq", {"group_size": 32, "layer": ("*.0.mlp.*=bits:8,group:-1",), "lm_head": 8, "dtype": "bf16"}),
        ("gptq", {"group_size": 32, "awq_scaling": True, "gptaq": True, "act_order": "static", "damp": 0.02}),
    ],
)
def test_the_recipe_in_a_report_repeats_the_run_byte_for_byte(
    method: str, fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    quantize_checkpoint(QuantizeOptions(source, str(tmp_path / "flags"), method, **{**QUICK, **fields}))
    recipe = json.loads((tmp_path / "flags" / REPORT_FILE).read_text())["recipe"]
    path = written(tmp_path, yaml.safe_dump(recipe))
    repeated = options(path, input=source, output=str(tmp_path / "recipe"), device="cpu", evaluate=False)
    report = quantize_checkpoint(repeated)
    assert contents(tmp_path / "recipe") == contents(tmp_path / "flags")
    assert report.recipe == recipe
    # The report itself is a recipe file as well.
    assert read_recipe(tmp_path / "flags" / REPORT_FILE).options == read_recipe(path).options


def test_a_recipe_without_a_method_names_its_components(tmp_path: Path) -> None:
    text = "bits: 3\ntransforms: [{name: awq, clip: false}]\nrounder: {name: gptq, damp: 0.05}\n"
    found = options(written(tmp_path, text))
    assert found.method == "recipe:awq+gptq"
    assert found.resolved_recipe.parts == (Awq(clip=False), Gptq(damp=0.05))
    spec = found.spec("1")
    assert (spec.bits, spec.group_size, spec.format) == (3, 128, "compressed-tensors")


@pytest.mark.parametrize("text", ["rounder: gptq\n", "transforms: [{name: awq, clip: false}]\nrounder: gptq\n"])
def test_a_run_without_a_method_is_repeated_byte_for_byte(
    text: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source, path = str(tiny_model("LlamaForCausalLM")), written(tmp_path, text + "group_size: 32\n")
    first, second = tmp_path / "first", tmp_path / "second"
    report = quantize_checkpoint(options(path, input=source, output=str(first), **QUICK))
    assert report.method not in METHODS and report.format == "compressed-tensors"
    again = options(first / REPORT_FILE, input=source, output=str(second), device="cpu", evaluate=False)
    assert quantize_checkpoint(again).recipe == report.recipe
    assert contents(second) == contents(first)


def test_a_method_and_a_rounder_of_the_same_name_are_different(tmp_path: Path) -> None:
    path = written(tmp_path, "rounder: gptq\n")
    assert options(path).spec("1").format == "compressed-tensors"
    assert options(path, method="gptq").spec("1").format == "gptq"


def test_quantized_activations_need_no_smoothing(tmp_path: Path) -> None:
    found = options(written(tmp_path, "rounder: gptq\nactivation_bits: 8\n"))
    assert found.spec("1").scheme == "w8a8"
    assert found.spec("1").group_size == -1


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "quant_type: gptq\nbits: 3\nsamples: 64\nrounder: {name: gptq, damp: 0.05, sweeps: 1}\n")
    found = options(path, bits=4, damp=0.1)
    assert (found.bits, found.samples) == (4, 64)
    assert found.resolved_recipe.rounder == Gptq(damp=0.1, sweeps=1)
    assert [part.name for part in options(path, method="awq", bits=4).resolved_recipe.parts] == ["awq", "rtn"]


def test_a_config_file_overrides_the_recipe(aiakq: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    words = ("quantize", "-i", tmp_path / "model", "-o", tmp_path / "out", "--config", config)
    (tmp_path / "model").mkdir()  # an empty folder: found after the options have been checked
    for in_config, in_recipe, code in ((5, 4, 2), (4, 5, 3)):
        config.write_text(f"bits: {in_config}\n")
        ended = aiakq(*words, "--recipe", written(tmp_path, f"quant_type: gptq\nbits: {in_recipe}\n"))
        assert ended.code == code, ended.err  # 2: a wrong option, 3: no such model
        assert ("--bits is 5" in ended.err) == (code == 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quant_type: gptq\nbits: 5\n", ["bits in", "recipe.yaml", "5"]),
        ("quant_type: gptq\nbits: four\n", ["bits in", "an integer"]),
        ("quant_type: exl2\n", ["quant_type in", "exl2"]),
        ("bits: 4\n", ["quant_type in"]),
        ("quant_type: gptq\nbitz: 4\n", ["'bitz' in"]),
        ("quant_type: gptq\noutput: there\n", ["'output' in"]),
        ("bits: &a 4\nskip: [*a]\n", ["line 2 has an alias"]),
        ("quant_type: gptq\ntransforms: awq\n", ["transforms in", "a list"]),
        ("quant_type: gptq\ntransforms: [rotate]\n", ["transforms[1] in", "rotate"]),
        ("quant_type: gptq\ntransforms: [{name: awq, clap: true}]\n", ["transforms[1].clap in", "It has: clip"]),
        ("quant_type: gptq\ntransforms: [{name: awq, clip: 1}]\n", ["transforms[1].clip in", "true or false"]),
        ("rounder: {name: gptq, damp: 2.0}\n", ["rounder.damp in", "at most 1"]),
        ("rounder: 7\n", ["rounder in", "a name"]),
        ("rounder: rtn\nactivation_bits: 4\n", ["activation_bits in"]),
        ("bits: [\n", ["line 2 is not valid YAML"]),
        ("- bits\n", ["no keys with values"]),
    ],
)
def test_errors_name_the_file_and_the_key(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(AiakqError) as caught:
        options(written(tmp_path, text))
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("transforms: [awq]\nrounder: gptq\n", "chooses the ranges itself"),
        ("transforms: [awq]\nrounder: rtn\nactivation_bits: 8\n", "assumes activations of 16 bits"),
        ("transforms: [smooth_quant]\nrounder: rtn\n", "only helps where activations are quantized"),
        ("transforms: [awq]\nrounder: {name: rtn, scale_search: mse}\n", "chooses the ranges already"),
        (
            "transforms: [{name: awq, clip: false}, {name: awq, clip: false}]\nrounder: gptq\n",
            "where the first one did",
        ),
        ("rounder: gptq\nactivation_bits: 8\nactivation_scales: tensor\n", "no transform in it stores"),
    ],
)
def test_parts_refuse_combinations_that_make_no_sense(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match=reason) as caught:
        options(written(tmp_path, text))
    assert caught.value.id == "option_conflict"
