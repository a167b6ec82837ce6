"""Rotary parameters of config.json files that leave them out: those of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import TINY
from transformers import CONFIG_MAPPING

from aiakq.errors import AiakqError
from aiakq.runtime.config.rope import rope_parameters
from aiakq.runtime.hf.mimo import register_mimo

#: Their positions are not rotary, or have no base in their config.
OTHERS = {
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "mamba",
    "nemotron_h",
    "opt",
    "gptj",
    "bloom",
    "mpt",
    "gpt2",
    "gpt_bigcode",
    "mamba2",
    "codegen",
    "gpt_neo",
    "xglm",
    "zamba",
}


def bases(rope: dict[str, Any]) -> set[tuple[str, float]]:
    """The base of each kind of layers."""
    if "rope_theta" in rope:
        rope = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    return {(kind, part["rope_theta"]) for kind, part in rope.items()}


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in TINY.values()} - OTHERS))
def test_what_a_file_leaves_out_is_what_its_class_has(kind: str) -> None:
    register_mimo()
    assert bases(rope_parameters({"model_type": kind})) == bases(CONFIG_MAPPING[kind]().rope_parameters)


@pytest.mark.parametrize("base", [float("nan"), float("inf"), -1.0, 0, 0.0])
def test_bases_that_are_no_numbers_are_refused(base: float) -> None:
    with pytest.raises(AiakqError) as caught:
        rope_parameters({"model_type": "llama", "rope_theta": base})
    assert caught.value.id == "model_malformed" and "rope_theta" in str(caught.value)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("family", "rope", "said"),
    [
        *(("llama", {"rope_type": kind}, "has no factor") for kind in ("linear", "dynamic", "yarn")),
        ("llama", {**LLAMA3, "low_freq_factor": None}, "has no low_freq_factor"),
        ("llama", {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "not below high_freq_factor"),
        ("llama", {"rope_type": "longrope", "short_factor": [1.0]}, "has no long_factor"),
        ("llama", {"rope_type": "linear", "factor": 0.0}, "factor of rope_type linear is 0.0"),
        ("llama", {"rope_type": "dynamic", "factor": -1.0}, "factor of rope_type dynamic is -1.0"),
        ("llama", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0}, "below beta_slow"),
        ("phi", {"rope_type": "default", "partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ("phi", {"rope_type": "default", "partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
        *(("phi3", {**LLAMA3, "rope_type": kind}, "rope_type") for kind in ("linear", "dynamic", "llama3")),
        *(("phimoe", {**LLAMA3, "rope_type": kind}, "rope_type") for kind in ("linear", "dynamic", "llama3", "yarn")),
        ("phimoe", LONG, "has no short_mscale"),
        ("llama", {"rope_type": "proportional"}, "llama models do not compute with it"),
        ("lfm3", {"rope_type": "default", "rope_theta": 1e6}, "not given by kind of layer"),
        *(
            (family, {"full_attention": {"rope_type": "default"}}, "same rotary")
            for family in ("llama", "qwen2", "lfm2")
        ),
    ],
    ids=str,
)
def test_parameters_that_transformers_refuses_or_warns_of_are_refused_by_name(
    family: str, rope: dict[str, Any], said: str
) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        if key == "rope_parameters" or "rope_type" in rope:
            with pytest.raises(AiakqError) as caught:
                rope_parameters({"model_type": family, key: rope})
            assert said in str(caught.value) and caught.value.id in ("model_malformed", "config_key_unsupported")


def test_phi3_and_phimoe_read_the_scaling_that_they_know() -> None:
    assert rope_parameters({"model_type": "phi3", "rope_scaling": {**LONG, "type": "su"}})["rope_type"] == "longrope"
    scales = {"short_mscale": 1.1, "long_mscale": 1.2}
    assert rope_parameters({"model_type": "phimoe", "rope_scaling": {**LONG, **scales}})["long_mscale"] == 1.2


def test_a_base_that_gemma3_leaves_out_for_windows_is_the_local_one() -> None:
    parts = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}}
    raw = {"model_type": "gemma3_text", "rope_parameters": parts}
    for older, bases in (({}, (1e4, 1e6)), ({"rope_local_base_freq": 7.0, "rope_theta": 9.0}, (7.0, 9.0))):
        found = rope_parameters({**raw, **older})
        assert (found["sliding_attention"]["rope_theta"], found["full_attention"]["rope_theta"]) == bases


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "parameters", "theta"),
    [
        (YARN, {"rope_type": "default", "rope_theta": 1e6}, None),
        (YARN, {"rope_type": "default", "rope_theta": 1e6}, 1e6),
        (YARN, {**YARN, "rope_theta": 1e6}, None),  # transformers takes the base of the class
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}, None),
        ({"type": "default"}, {"rope_type": "linear", "factor": 4.0}, None),
    ],
)
def test_two_scalings_that_differ_are_refused(scaling, parameters, theta) -> None:
    """Guides add rope_scaling to config.json, also to files of transformers 5, which have rope_parameters."""
    raw = {"model_type": "llama", "rope_scaling": scaling, "rope_parameters": parameters}
    with pytest.raises(AiakqError) as caught:
        rope_parameters(raw if theta is None else {**raw, "rope_theta": theta})
    assert caught.value.id == "config_key_unsupported" and "rope_scaling" in str(caught.value)


def test_both_spellings_of_one_scaling_are_read() -> None:
    raw = {"model_type": "llama", "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert rope_parameters({**raw, "rope_parameters": new}) == rope_parameters(raw) == new


BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("family", "key", "value", "parameters"),
    [
        ("llama", "rope_theta", 5e5, {"rope_theta": 1e6}),
        ("llama", "rope_theta", 5e5, {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}),
        ("glm", "partial_rotary_factor", 0.5, {"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
        ("gpt_neox", "rotary_emb_base", 5e5, {"rope_theta": 1e6}),
        ("gemma3_text", "rope_theta", 5e5, BY_KIND),
        ("gemma3_text", "rope_local_base_freq", 2e4, BY_KIND),
    ],
)
def test_a_key_that_contradicts_rope_parameters_is_refused(family, key, value, parameters) -> None:
    """Files of transformers 5 are edited at the place where older files have the key, which transformers leaves out."""
    raw = {"model_type": family, "rope_parameters": parameters}
    with pytest.raises(AiakqError) as caught:
        rope_parameters({**raw, key: value})
    assert caught.value.id == "config_key_unsupported" and key in str(caught.value) and str(value) in str(caught.value)
    parts = parameters.values() if parameters is BY_KIND else [parameters]
    name = "partial_rotary_factor" if key == "partial_rotary_factor" else "rope_theta"
    for part in parts:  # the same value, an integer too
        assert rope_parameters({**raw, key: part[name]}) == rope_parameters(raw)
    assert rope_parameters({**raw, "rope_theta": int(1e6)}) == rope_parameters(raw)


def test_a_key_that_completes_rope_parameters_is_read() -> None:
    raw = {"model_type": "llama", "rope_theta": 5e5}
    for parameters in ({"rope_type": "default"}, {"rope_theta": None}):
        assert rope_parameters({**raw, "rope_parameters": parameters})["rope_theta"] == 5e5
    half = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    raw = {"model_type": "olmo3", "rope_theta": 5e5, "rope_parameters": half}
    assert bases(rope_parameters(raw)) == {("full_attention", 1e6), ("sliding_attention", 5e5)}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", [1], 2.0])
def test_a_scaling_that_is_no_object_is_named(key, value) -> None:
    with pytest.raises(AiakqError) as caught:
        rope_parameters({"model_type": "llama", key: value})
    assert f"{key} is {value!r}, not an object" in str(caught.value)


def test_a_base_of_null_is_that_of_the_class() -> None:
    assert rope_parameters({"model_type": "llama4_text", "rope_parameters": {"rope_theta": None}})["rope_theta"] == 5e5
