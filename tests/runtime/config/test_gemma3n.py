"""The layers of Gemma 3n, and what the model around them has for their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.config.gemma3n import media_embedders
from aiakq.runtime.config.model import ModelConfig

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 20,
    "vocab_size": 320,
}


def read(**values: Any) -> ModelConfig:
    return ModelConfig.from_hf({**GEMMA, **values})


def test_a_file_without_lists_has_those_of_transformers_class() -> None:
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING["gemma3n_text"](**{name: GEMMA[name] for name in GEMMA if name != "architectures"})
    config = read()
    assert config.raw["intermediate_size"] == usual.intermediate_size == [16384] * 20
    assert config.raw["activation_sparsity_pattern"] == usual.activation_sparsity_pattern
    assert list(config.layer_kinds) == usual.layer_types
    assert {kind: dict(rope) for kind, rope in config.rope.items()} == usual.rope_parameters
    modes = usual.kv_sharing_modes
    assert [layer for layer in range(20) if modes[layer] == "reuse"] == sorted(config.cache_sources)
    assert config.cache_sources[19] == 4 and config.cache_sources[18] == 3
    assert read(num_hidden_layers=5, num_kv_shared_layers=0).raw["activation_sparsity_pattern"] == [0.0] * 5


def test_layers_have_widths_of_their_own() -> None:
    widths = [128] * 10 + [256] * 10
    config = read(intermediate_size=widths, rope_theta=5e4, rope_local_base_freq=300.0)
    assert config.raw["intermediate_size"] == widths and config.intermediate_size == 256
    assert config.rope_of(4)[1]["rope_theta"] == 5e4 and config.rope_of(3)[1]["rope_theta"] == 300.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"intermediate_size": [64] * 19}, "intermediate_size"),
        ({"intermediate_size": [64] * 19 + [0]}, "intermediate_size"),
        ({"intermediate_size": ["64"] * 20}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.5] * 19}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [1.0] * 20}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [None] * 20}, "activation_sparsity_pattern"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4, but a token has 4 hidden states"),
        ({"altup_num_inputs": 0}, "altup_num_inputs"),
        ({"num_kv_shared_layers": 20}, "the last 20 layers share"),
        ({"laurel_scale": 2.0}, "laurel_scale"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(AiakqError, match=said) as caught:
        read(**values)
    assert caught.value.id in ("model_malformed", "config_key_unsupported") and "\n" not in str(caught.value)


def test_tokens_of_images_and_sounds_are_those_of_transformers_classes() -> None:
    from transformers import CONFIG_MAPPING

    for name, part in (("embed_vision", "gemma3n_vision"), ("embed_audio", "gemma3n_audio")):
        fields = {field: each.default for field, each in CONFIG_MAPPING[part].__dataclass_fields__.items()}
        found = media_embedders({})[name]
        assert found == {key: fields[key] for key in found}
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    inside = {name: value for name, value in GEMMA.items() if name != "architectures"}
    config = read(**outer, text_config=inside, vision_config={"vocab_offset": 300, "vocab_size": 20})
    assert config.architecture == "Gemma3nForCausalLM"
    assert config.raw["media_embedders"]["embed_vision"] == {
        "vocab_offset": 300, "vocab_size": 20, "hidden_size": 2048, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert read().raw.get("media_embedders") is None
