"""The module selection of adapter_config.json: what PEFT would ignore is refused, and nothing else."""

from __future__ import annotations

import json
import shutil
import warnings
from typing import Any

import pytest
import torch
from lora_adapters import adapted, save_adapter

from aiakq.errors import AiakqError
from aiakq.runtime.lora.adapter_config import parse_config
from aiakq.runtime.lora.adapter_folder import CONFIG, open_adapter
from aiakq.runtime.lora.layers import check_fits
from aiakq.runtime.lora.target_modules import DEFAULT_TARGETS

Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
ABSENT = object()
#: The target modules of a trained adapter; what is then changed in its config.
AGREEING: dict[str, tuple[list[str], dict[str, Any]]] = {
    "unchanged": (["q_proj", "down_proj"], {}),
    "more targets than tensors": (["q_proj"], {"target_modules": ["q_proj", "k_proj"]}),
    "full names": (["q_proj"], {"target_modules": [Q0, Q1]}),
    "a longer suffix": (["q_proj"], {"target_modules": ["self_attn.q_proj"]}),
    "a regular expression": (["q_proj", "down_proj"], {"target_modules": r".*\.(q|down)_proj"}),
    "an expression with alternatives": (["q_proj", "k_proj"], {"target_modules": r".*q|.*q_proj|.*k_proj"}),
    "all linear layers": (["q_proj", "down_proj"], {"target_modules": "all-linear"}),
    "all linear layers in capitals": (["q_proj"], {"target_modules": "ALL-Linear"}),
    "the default": (["q_proj", "v_proj"], {"target_modules": None}),
    "the default of a missing field": (["v_proj"], {"target_modules": ABSENT}),
    "an exclusion of others": (["q_proj"], {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]}),
    "all layers": (["q_proj"], {"layers_to_transform": [0, 1], "layers_pattern": "layers"}),
    "several layer patterns": (["q_proj"], {"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}),
    "no layers": (["q_proj"], {"layers_to_transform": []}),
    "layers beside full names": (["q_proj"], {"target_modules": [Q0, Q1], "layers_to_transform": [1]}),
    "a head by its name": (["q_proj", "lm_head"], {}),
}
CONTRADICTING: dict[str, tuple[list[str], dict[str, Any]]] = {
    "target_modules: fewer": (["q_proj", "down_proj"], {"target_modules": ["q_proj"]}),
    "target_modules: another": (["q_proj"], {"target_modules": ["x_proj"]}),
    "target_modules: none": (["q_proj"], {"target_modules": []}),
    "target_modules: no text": (["q_proj"], {"target_modules": ""}),
    "target_modules: part of a word": (["q_proj"], {"target_modules": ["proj"]}),
    "target_modules: an expression for fewer": (["q_proj", "k_proj"], {"target_modules": r".*\.q_proj"}),
    "target_modules: an expression for a part of the name": (["q_proj"], {"target_modules": "q_proj"}),
    "target_modules: all linear layers do not include the head": (
        ["q_proj", "lm_head"],
        {"target_modules": "all-linear"},
    ),
    "target_modules: more than the default": (["q_proj", "k_proj"], {"target_modules": None}),
    "target_modules: more than the default of a missing field": (["k_proj"], {"target_modules": ABSENT}),
    "exclude_modules: a name": (["q_proj", "k_proj"], {"exclude_modules": ["k_proj"]}),
    "exclude_modules: an expression": (["q_proj"], {"exclude_modules": r".*layers\.0.*"}),
    "exclude_modules: everything": (["q_proj"], {"exclude_modules": ".*"}),
    "layers_to_transform: a list": (["q_proj"], {"layers_to_transform": [1]}),
    "layers_to_transform: a number": (["q_proj"], {"layers_to_transform": 1}),
    "layers_to_transform: beyond the model": (["q_proj"], {"layers_to_transform": [7]}),
    "layers_to_transform: with a pattern": (["q_proj"], {"layers_to_transform": [1], "layers_pattern": ["layers"]}),
    "layers_to_transform: another pattern": (["q_proj"], {"layers_to_transform": [0, 1], "layers_pattern": ["h"]}),
}


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def linear_layers(model):
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: (module.out_features, module.in_features) for name, module in linear.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives the folder that PEFT saved an adapter of these target modules to, and its output."""
    root, known = tmp_path_factory.mktemp("saved"), {}

    def of(targets):
        key = "-".join(targets)
        if key not in known:
            model = adapted(tiny_llama(), r=4, target_modules=targets)
            model.save_pretrained(str(root / key), save_embedding_layers=False)
            known[key] = root / key, output_of(model)
        return known[key]

    return of


def output_of(model):
    with torch.inference_mode():
        return model(torch.arange(9)[None]).logits


def changed(folder, path, fields):
    """A copy of the adapter with other fields in its config."""
    shutil.copytree(folder, path)
    values = {**json.loads((path / CONFIG).read_text()), **fields}
    (path / CONFIG).write_text(json.dumps({name: value for name, value in values.items() if value is not ABSENT}))
    return path


def loaded_by_peft(folder):
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(tiny_llama(), str(folder)).eval()


def check(folder, modules=None, model_type="llama"):
    check_fits(open_adapter(folder), modules or linear_layers(tiny_llama()), model_type)


@pytest.mark.parametrize("name", AGREEING)
def test_a_config_that_selects_all_modules_is_accepted_and_peft_loads_them_all(name, saved, tmp_path):
    targets, fields = AGREEING[name]
    folder, output = saved(targets)
    folder = changed(folder, tmp_path / "adapter", fields)
    torch.testing.assert_close(output_of(loaded_by_peft(folder)), output)
    check(folder)


@pytest.mark.parametrize("name", CONTRADICTING)
def test_tensors_that_peft_ignores_are_refused_with_the_field(name, saved, tmp_path):
    targets, fields = CONTRADICTING[name]
    folder, output = saved(targets)
    folder = changed(folder, tmp_path / "adapter", fields)
    try:
        assert not torch.allclose(output_of(loaded_by_peft(folder)), output)
    except ValueError as refusal:  # nothing is selected
        assert "target_modules" in str(refusal).replace("Target modules", "target_modules")
    with pytest.raises(AiakqError) as caught:
        check(folder)
    field = name.partition(":")[0]
    assert caught.value.id == "adapter_contradiction" and f"{field} in its" in str(caught.value)
    assert f"Correct {field}, or remove" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": 3},
        {"target_modules": ["q_proj", 3]},
        {"target_modules": {"q_proj": 1}},
        {"exclude_modules": 3},
        {"layers_to_transform": "1"},
        {"layers_to_transform": [True]},
        {"layers_to_transform": [0, 1], "layers_pattern": 3},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers"] * 100},
        {"layers_pattern": "layers"},
        {"target_modules": ".*q_proj", "layers_to_transform": [0, 1]},
        {"target_modules": ".*q_proj", "layers_pattern": "layers"},
    ],
)
def test_values_that_select_nothing_sensible_are_refused_with_their_field(fields, saved, tmp_path):
    folder = changed(saved(["q_proj"])[0], tmp_path / "adapter", fields)
    with pytest.raises(AiakqError) as caught:
        open_adapter(folder)
    assert caught.value.id == "adapter_malformed" and any(field in str(caught.value) for field in fields)


@pytest.mark.parametrize("pattern", ["(q_proj", "(a|[a-z.]|.)*[!?]"])
def test_an_expression_that_is_malformed_or_too_costly_is_refused(pattern, saved, tmp_path):
    layered = {"layers_to_transform": [0, 1], "layers_pattern": [pattern]}
    for fields in ({"target_modules": pattern}, {"exclude_modules": pattern}, layered):
        folder = changed(saved(["q_proj"])[0], tmp_path / [*fields][-1], fields)
        with pytest.raises(AiakqError) as caught:
            check(folder)
        assert caught.value.id == "adapter_pattern"
        assert f"{pattern!r} in {[*fields][-1]}, " in str(caught.value)


def test_names_are_selected_as_peft_selects_them():
    """Names with and without a prefix, experts, other words before the layer number, and layer numbers alone."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    names = [Q0, Q1, Q0.removeprefix("model."), "lm_head", "transformer.h.1.attn.c_attn", "h.1.attn.c_attn"]
    names += ["model.language_model.layers.10.mlp.down_proj", "model.vision.blocks.1.proj", "1.q_proj", "q_proj"]
    names += ["model.layers.1.mlp.experts.0.down_proj", "a.layers.1.b.layers.0.q_proj", "layers.1.q_proj"]
    suffixes = ["q_proj", "down_proj", "c_attn", "lm_head", "proj"]
    configs = [{"target_modules": suffixes}, {"target_modules": [*suffixes, *names]}]
    for layers in (0, 1, [1], [0, 10]):
        for pattern in (None, "layers", ["h", "layers"], ["blocks"], "lay", r"layers|h", r"\w+"):
            configs.append({"target_modules": suffixes, "layers_to_transform": layers, "layers_pattern": pattern})
    for regex in (r".*q_proj", r"q_proj", r"model\..*", r"(?i).*LM_HEAD", r".*\.\d+\..*", r"(.*)\.q_proj|lm_head"):
        configs += [{"target_modules": regex}, {"target_modules": suffixes, "exclude_modules": regex}]
    configs.append({"target_modules": suffixes, "exclude_modules": ["1.self_attn.q_proj", "lm_head", "head"]})
    for fields in configs:
        targets = parse_config({"peft_type": "LORA", **fields}, "a").targets
        for name in names:
            expected = bool(check_target_module_exists(LoraConfig(**fields), name))
            assert (targets.deselecting_field(name, "llama") is None) == expected, (fields, name)


def test_the_defaults_are_those_of_peft():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    from aiakq.runtime.models import ARCHITECTURES

    native = {
        kind
        for kind, names in CLASSES.items()
        if set([names] if isinstance(names, str) else names) & set(ARCHITECTURES)
    }
    expected = {kind: tuple(PEFT[kind]) for kind in PEFT if kind in native or kind == "llama4"}
    assert {kind: set(names) for kind, names in DEFAULT_TARGETS.items()} == {
        kind: set(names) for kind, names in expected.items()
    }


MULTIMODAL = r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?(?:q_proj|v_proj|gate_proj).*?)"


@pytest.mark.parametrize(
    ("prefix", "in_model", "targets"),
    [
        ("model.language_model.layers", "model.layers", MULTIMODAL),
        ("language_model.model.layers", "model.language_model.layers", MULTIMODAL),
        ("model.layers", "model.language_model.layers", MULTIMODAL),
        ("model.language_model.layers", "model.layers", ["q_proj"]),
        ("transformer.h", "h", r"transformer\.h\.\d+\..*q_proj"),
        ("h", "transformer.h", ["transformer.h.0.self_attn.q_proj", "transformer.h.1.self_attn.q_proj"]),
    ],
)
def test_modules_may_be_selected_by_their_name_in_the_adapter_or_in_the_model(
    prefix, in_model, targets, saved, tmp_path
):
    from safetensors.torch import load_file, save_file

    folder = changed(saved(["q_proj"])[0], tmp_path / "adapter", {"target_modules": targets})
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("model.model.layers", f"model.{prefix}"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    modules = {name.replace("model.layers", in_model): shape for name, shape in linear_layers(tiny_llama()).items()}
    check(folder, modules)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("Phi3ForCausalLM", ["qkv_proj", "gate_up_proj"]),
        ("GPT2LMHeadModel", None),
        ("FalconForCausalLM", None),
        ("MptForCausalLM", r".*\.(Wqkv|up_proj)"),
        ("Gemma3ForCausalLM", "all-linear"),
        ("Mamba2ForCausalLM", ["in_proj"]),
    ],
)
def test_adapters_that_peft_trains_on_other_families_are_accepted(architecture, targets, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    from aiakq import LLM

    folder = tiny_model(architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = save_adapter(adapted(model, r=2, target_modules=targets), tmp_path / "adapter")
    limits = LLM(str(folder), enable_lora=True, max_model_len=64, num_gpu_blocks_override=20).engine.limits.adapters
    assert limits is not None and limits.model_type == model.config.model_type
    for value in (json.loads((adapter / CONFIG).read_text())["target_modules"], targets):
        copy = changed(adapter, tmp_path / f"copy of {value!s:.20}", {"target_modules": value})
        check(copy, limits.modules, limits.model_type)
        shutil.rmtree(copy)
