"""No key of an encoder, of the model around it or of its processor is dropped in silence."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from published_audio_configs import CONFIGS as AUDIO_CONFIGS
from published_image_configs import CONFIGS, PROCESSORS
from vision_models import image_processor_of

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.multimodal.config_keys import check_processor_keys, refused_key, special_token


def refusal_of(raw: dict[str, Any]) -> str:
    found = MultimodalConfig.from_args(EngineArguments(model="x"), "", raw)
    assert found is not None
    return refused_key(found)


def changed(name: str, **values: Any) -> dict[str, Any]:
    """The config.json of a release with other values in its ``vision_config``."""
    raw = copy.deepcopy(CONFIGS[name])
    raw["vision_config"] |= values
    return raw


@pytest.mark.parametrize("name", AUDIO_CONFIGS)
def test_published_configs_of_models_that_hear_are_understood(name):
    from aiakq.runtime.config.model import ModelConfig

    raw = AUDIO_CONFIGS[name]
    assert refusal_of(raw) == ""
    assert ModelConfig.from_hf(raw).vocab_size == raw["vocab_size"]
    reason = refusal_of({**raw, "projector_kind": "resampler"})
    assert reason.startswith("config.json has projector_kind = 'resampler', and transformers' ")
    for key, value in {"num_register_tokens": 4, "num_key_value_heads": 5, "head_dim": 65}.items():
        reason = refusal_of({**raw, "audio_config": raw["audio_config"] | {key: value}})
        assert reason.startswith(f"config.json has audio_config.{key} = {value}, and transformers' ")


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_are_understood(name):
    assert refusal_of(CONFIGS[name]) == ""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("key", "value"), [("num_register_tokens", 4), ("attention_logit_softcapping", 30.0)])
def test_an_unknown_key_of_an_encoder_is_refused_by_name(name, key, value):
    reason = refusal_of(changed(name, **{key: value}))
    assert reason.startswith(f"config.json has vision_config.{key} = {value}, and transformers' ")
    assert reason.endswith("if it has no effect on the answers, remove it from the file")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "Qwen2-VL"])
def test_an_unknown_key_beside_an_encoder_is_refused_by_name(name):
    reason = refusal_of({**CONFIGS[name], "projector_kind": "resampler"})
    assert reason.startswith("config.json has projector_kind = 'resampler', and transformers' ")


def test_flat_files_have_the_keys_of_the_language_model_beside_the_encoder():
    """Of these an unknown key is refused with the language model's."""
    from aiakq.runtime.config.model import ModelConfig

    raw = {**CONFIGS["Qwen2-VL"], "num_attention_heads": 12, "num_hidden_layers": 2, "projector_kind": "resampler"}
    with pytest.raises(AiakqError, match="projector_kind"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Qwen2-VL", {"in_chans": 4}),
        ("Qwen2-VL", {"spatial_patch_size": 16}),
        ("Qwen2.5-VL, written by transformers 4.5x", {"in_chans": 3, "in_channels": 4}),
        ("Mistral Small 3.1", {"rope_parameters": {"rope_theta": 10000.0, "twisted": True}}),
        ("Mistral Small 3.1", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twisted": 3}}),
        ("LLaVA 1.5", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("SmolVLM2", {"num_register_tokens": 4}),
    ],
)
def test_values_that_make_a_difference_are_refused(name, values):
    assert "config.json has vision_config." in refusal_of(changed(name, **values))


def test_the_rotary_scaling_around_an_encoder_has_to_be_that_of_the_language_model():
    name = "Qwen2.5-VL, written by transformers 4.5x"
    scaled = {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24], "original_max_position_embeddings": 32768}
    assert refusal_of({**CONFIGS[name], "rope_scaling": scaled}).startswith("config.json has rope_scaling = ")


def write(folder: Any, files: tuple[dict[str, Any], dict[str, Any]]) -> str:
    for name, values in zip(("preprocessor_config.json", "processor_config.json"), files, strict=True):
        if values:
            (folder / name).write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_published_processors_are_understood(kind, tmp_path):
    check_processor_keys(image_processor_of(kind), write(tmp_path, PROCESSORS[kind]))


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("place", [0, 1], ids=["preprocessor_config.json", "processor_config.json"])
def test_an_unknown_key_of_a_processor_is_refused_by_name(kind, place, tmp_path):
    files = copy.deepcopy(PROCESSORS[kind])
    files[place]["sharpen"] = 2
    with pytest.raises(AiakqError, match="has sharpen = 2, which transformers' .*Pil does not read"):
        check_processor_keys(image_processor_of(kind), write(tmp_path, files))


def test_keys_of_an_image_processor_inside_processor_config_are_checked(tmp_path):
    inside = {"image_processor": {**PROCESSORS["llava"][0], "sharpen": 2}}
    with pytest.raises(AiakqError, match="has sharpen = 2"):
        check_processor_keys(image_processor_of("llava"), write(tmp_path, (PROCESSORS["llava"][0], inside)))


def test_processor_config_names_the_tokens_of_rows(tmp_path):
    folder = write(tmp_path, ({}, {"image_break_token": "[ROW]"}))
    named = special_token(SimpleNamespace(hf=SimpleNamespace(image_break_token="[BREAK]")), folder)
    assert (named("image_break_token", "a"), named("image_end_token", "b")) == ("[ROW]", "b")
