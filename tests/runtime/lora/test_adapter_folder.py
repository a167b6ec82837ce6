"""The reader of PEFT's adapters: equality with PEFT over its fields, and refusals that name what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_adapters import FIELDS, adapted, save_adapter
from random_examples import examples
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.patterns import time_limit
from aiakq.runtime.lora import requests
from aiakq.runtime.lora.adapter_config import parse_config
from aiakq.runtime.lora.adapter_folder import CONFIG, WEIGHTS, open_adapter
from aiakq.runtime.lora.requests import check_adapter
from aiakq.runtime.protocol.limits import AdapterLimits


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plain adapter."""
    return save_adapter(adapted(tiny_llama(), r=4, target_modules=["q_proj"]), tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(saved, tmp_path / "adapter")


def change(folder, **fields):
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **fields}))


def refusal(folder, **arguments):
    with pytest.raises(AiakqError) as caught:
        open_adapter(folder, **arguments)
    return caught.value


@pytest.mark.parametrize("name", FIELDS)
def test_every_module_gets_the_product_that_peft_gives_it(name, tmp_path):
    model = adapted(tiny_llama(), seed=3, **FIELDS[name])
    adapter = open_adapter(save_adapter(model, tmp_path))
    digest, weights = adapter.read()
    assert digest == adapter.digest()
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A") and len(layer.lora_A)
    }
    assert set(weights) == set(layers) and layers
    for module, layer in layers.items():
        mine = weights[module]
        torch.testing.assert_close(mine.scale * mine.b @ mine.a, layer.get_delta_weight("default"))
        bias, magnitude = layer.lora_B["default"].bias, layer.lora_magnitude_vector
        assert (mine.bias is None) == (bias is None) and (mine.magnitude is None) == (not len(magnitude))
        if mine.bias is not None:
            torch.testing.assert_close(mine.bias, bias)
        if mine.magnitude is not None:
            torch.testing.assert_close(mine.magnitude, magnitude["default"].weight)


UNSUPPORTED = {
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa_niter_4",
    "trainable_token_indices": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2], [1, 2]],
    "alora_invocation_tokens": [5],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"x": 1},
    "megatron_config": {"x": 1},
    "velora_config": {"x": 1},
    "a_field_of_next_year": 0.5,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_field_that_is_not_supported_is_refused_by_its_name(field, folder):
    change(folder, **{field: UNSUPPORTED[field]})
    problem = refusal(folder)
    assert problem.id == "adapter_unsupported" and field in str(problem)


def test_every_field_of_peft_is_known():
    import dataclasses

    from peft import LoraConfig

    from aiakq.runtime.lora import adapter_config

    known = adapter_config._WITHOUT_EFFECT | adapter_config._READ | set(adapter_config._REFUSED)
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= known
    assert parse_config({"peft_type": "LORA", "bias": "none", "loftq_config": {}}, "a").rank == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 0),
        ("r", True),
        ("r", "8"),
        ("r", 5),
        ("lora_alpha", float("inf")),
        ("lora_alpha", [8]),
        ("use_rslora", "false"),
        ("use_dora", 1),
        ("use_dora", True),
        ("lora_bias", True),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 3}),
        ("rank_pattern", {"q_proj": 0.5}),
        ("alpha_pattern", {"q_proj": "x"}),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_field(field, value, folder):
    change(folder, **{field: value})
    problem = refusal(folder)
    assert problem.id == "adapter_malformed" and (field in str(problem) or "rank" in str(problem))


def test_a_pattern_that_would_run_forever_is_refused(folder):
    change(folder, alpha_pattern={"(a|[a-z]|.)*[!?]": 3})
    problem = refusal(folder)
    assert problem.id == "adapter_pattern" and "'(a|[a-z]|.)*[!?]' in alpha_pattern" in str(problem)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["*q_proj", "(q_proj", "[q_proj", "q_proj)", "+", "q_proj\\"])
def test_a_pattern_that_is_no_regular_expression_is_named_with_its_field_and_the_reason(field, pattern, folder):
    """PEFT fails on it."""
    from peft.utils.other import get_pattern_key

    with pytest.raises(re.error):
        get_pattern_key([pattern], "model.layers.0.self_attn.q_proj")
    change(folder, **{field: {pattern: 4}})
    problem = refusal(folder)
    assert problem.id == "adapter_pattern" and f"has {pattern!r} in {field}, " in str(problem)
    assert "at position" not in str(problem), "it would be the position in another expression"


def test_a_pattern_after_the_one_that_matches_is_not_read(folder):
    """As in PEFT, which compiles one after another."""
    from peft.utils.other import get_pattern_key

    keys = {"q_proj": 4, "*": 8}
    assert get_pattern_key(list(keys), "model.layers.0.self_attn.q_proj") == "q_proj"
    change(folder, rank_pattern=keys, alpha_pattern=keys)
    assert {module.scale for module in open_adapter(folder).modules.values()} == {1.0}


@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_zero_is_a_setting_like_any_other_number_unless_the_field_is_a_switch(value, folder):
    change(folder, lora_dropout=value, use_qalora=value, use_bdlora=value)
    assert open_adapter(folder).modules
    change(folder, a_field_of_next_year=value)
    assert "a_field_of_next_year = " in str(refusal(folder))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "no lora_B"),
        (lambda t: {k: v.flatten() if "lora_A" in k else v for k, v in t.items()}, "not matrices"),
        (lambda t: {k: v[:0] if "lora_A" in k else v for k, v in t.items()}, "not matrices"),
        (lambda t: {k: v[:3].clone() if "lora_A" in k else v for k, v in t.items()}, "rank"),
        (lambda t: {k: v.double() for k, v in t.items()}, "F64"),
        (lambda t: {}, "no tensors"),
        (lambda t: {**t, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}, "embedding"),
        (lambda t: {**t, "base_model.model.lm_head.weight": torch.zeros(4, 9)}, "replaces a layer"),
        (lambda t: {**t, "other": torch.zeros(4, 9)}, "not one of PEFT's"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(changed, reason, folder):
    tensors = changed(load_file(folder / WEIGHTS))
    save_file(tensors, folder / WEIGHTS)
    problem = refusal(folder)
    assert problem.id in ("adapter_malformed", "adapter_unsupported") and reason in str(problem)


def test_numbers_that_are_not_finite_are_refused(folder):
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(AiakqError, match="not finite"):
        open_adapter(folder).read()


def test_the_rank_is_checked_before_any_tensor_is_read(folder):
    assert open_adapter(folder, max_rank=4).max_rank == 4
    problem = refusal(folder, max_rank=3)
    assert problem.id == "adapter_rank" and "rank 4" in str(problem) and "3" in str(problem)


def test_a_pickle_is_not_opened(folder):
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    assert "pickle" in str(refusal(folder))


def test_only_folders_inside_the_root_are_opened(folder, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    inside = shutil.copytree(folder, root / "mine")
    (root / "link").symlink_to(folder)
    open_adapter(inside, root)
    for path in (folder, root / "link", root / ".." / "adapter", root / "mine" / ".." / ".." / "adapter"):
        assert refusal(path, root=root).id == "adapter_outside_root"
    (inside / WEIGHTS).unlink()
    (inside / WEIGHTS).symlink_to(folder / WEIGHTS)
    assert refusal(inside, root=root).id == "path_outside_model"


@pytest.mark.parametrize("path", ["no/such/folder", "", "a\0b"])
def test_a_missing_folder_is_reported(path, tmp_path):
    assert refusal(tmp_path / "x" / path if path else tmp_path).id == "adapter_missing"


@pytest.mark.parametrize(("file", "problem"), [(WEIGHTS, "model_malformed"), (CONFIG, "model_malformed")])
def test_a_header_or_config_of_gigabytes_is_not_read(file, problem, folder):
    """The file is sparse: reading it would take the memory that it claims."""
    with (folder / file).open("r+b") as stream:
        stream.truncate(1 << 40)
        if file == WEIGHTS:
            stream.write((1 << 38).to_bytes(8, "little"))
    assert refusal(folder).id == problem


def test_special_files_are_refused(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert refusal(folder).id == "model_malformed"


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_with_an_error_of_ours(data, saved, tmp_path):
    copy = tmp_path / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved, copy)
    file = copy / data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 1500) - 1))
        content[at : at + 1] = data.draw(st.binary(max_size=3))
    file.write_bytes(content)
    try:
        open_adapter(copy).read()
    except AiakqError as problem:
        assert "\n" not in str(problem).strip()


def test_the_digest_tells_adapters_apart(folder):
    first = open_adapter(folder).digest()
    assert open_adapter(folder).digest() == first
    change(folder, lora_alpha=9)
    second = open_adapter(folder).digest()
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / WEIGHTS)
    assert len({first, second, open_adapter(folder).digest()}) == 3


def test_tensors_are_read_as_the_header_that_is_hashed_says(folder):
    """The file is replaced by one with the same tensors in another order after its header was read."""
    opened, path = open_adapter(folder), folder / WEIGHTS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    first, second = (f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight" for layer in range(2))
    header[first]["data_offsets"], header[second]["data_offsets"] = (
        header[second]["data_offsets"],
        header[first]["data_offsets"],
    )
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    digest, weights = opened.read()
    assert digest == open_adapter(folder).digest()
    read = load_file(path)
    assert torch.equal(weights["model.layers.0.self_attn.q_proj"].a, read[first])
    assert not torch.equal(read[first], read[second])


def test_a_path_that_is_too_long_is_missing(tmp_path):
    for path in ("a" * 4000, "a/" * 2000, f"{tmp_path}/{'b' * 300}"):
        with pytest.raises(AiakqError) as caught:
            open_adapter(tmp_path / path, tmp_path)
        assert caught.value.id == "adapter_missing" and len(str(caught.value)) < 500


def test_the_patterns_of_an_adapter_have_a_time_limit_together(folder, monkeypatch):
    """Each of 4000 patterns may take half a second for each module; meanwhile no other adapter is loaded."""
    monkeypatch.setattr(requests, "_PATTERN_SECONDS", 0.001)
    limits = AdapterLimits(16, modules=dict.fromkeys(open_adapter(folder).modules, (32, 32)), model_type="llama")
    change(folder, rank_pattern={f"(?:.*.*.*.*.*)[xyz]{number}[xyz]": 4 for number in range(4000)})
    with pytest.raises(AiakqError, match="the patterns of this file take too long to match"):
        check_adapter("slow", folder, limits)


def test_many_plain_patterns_are_matched_within_the_time_limit(folder):
    names = {f"model.layers.{layer}.self_attn.other_proj": 4 for layer in range(4000)}
    change(folder, rank_pattern=names, alpha_pattern=names)
    with time_limit(0.5):
        assert open_adapter(folder).max_rank == 4


def test_an_adapter_that_cannot_be_read_in_time_is_refused(folder):
    with pytest.raises(AiakqError, match="cannot be read within -0 s"):
        open_adapter(folder).digest(seconds=-0.1)
