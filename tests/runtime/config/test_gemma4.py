"""The layers of Gemma 4: their heads, and whose keys and values they read."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.config.model import ModelConfig

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "vocab_size": 320,
}


def heads(**values: Any) -> dict[int, tuple[int, int]]:
    return dict(ModelConfig.from_hf({**GEMMA, **values}).layer_heads)


def test_the_last_layer_has_full_attention_whatever_the_file_says() -> None:
    config = ModelConfig.from_hf({**GEMMA, "layer_types": ["sliding_attention"] * 8})
    assert config.layer_kinds == (*["sliding_attention"] * 7, "full_attention")
    assert ModelConfig.from_hf(GEMMA).layer_kinds[5:] == ("full_attention", "sliding_attention", "full_attention")


def test_layers_with_full_attention_have_heads_of_another_size() -> None:
    assert heads() == {5: (512, 2), 7: (512, 2)}
    assert heads(global_head_dim=32, num_global_key_value_heads=1) == {5: (32, 2), 7: (32, 2)}
    keys = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    assert heads(**keys) == {5: (32, 1), 7: (32, 1)}
    assert heads(**keys, per_layer_config={}) == {}
    config = ModelConfig.from_hf({**GEMMA, "per_layer_config": {"05": {"head_dim": 32}, "7": {"head_dim": 32}}})
    assert config.of_layer(7).head_dim == 32 and config.of_layer(7).num_kv_heads == 2
    assert config.of_layer(6) is config


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"5": {"head_dim": 32}}, "the same sizes"),
        ({"5": {"head_dim": 31}, "7": {"head_dim": 31}}, "cannot share 2 key-value heads of 31"),
        (dict.fromkeys(("5", "7"), {"num_key_value_heads": 3}), "cannot share 3"),
        ({"8": {"head_dim": 32}}, "by their number"),
        ({"x": {"head_dim": 32}}, "by their number"),
        ({"5": 32}, "by their number"),
        ({"5": {"head_dim": "32"}}, "head_dim"),
        ({"5": {"intermediate_size": 32}}, "have the same intermediate_size in every layer"),
        ([], "per_layer_config"),
    ],
)
def test_sizes_that_layers_cannot_have_are_refused(sizes: Any, said: str) -> None:
    with pytest.raises(AiakqError, match=said) as caught:
        heads(per_layer_config=sizes)
    assert caught.value.id in ("model_malformed", "config_key_unsupported") and "\n" not in str(caught.value)


def test_the_last_layers_read_the_last_keys_of_their_kind() -> None:
    assert ModelConfig.from_hf(GEMMA).cache_sources == {}
    assert ModelConfig.from_hf({**GEMMA, "num_kv_shared_layers": 2}).cache_sources == {6: 4, 7: 5}
    for shared in (3, 8, 9):
        with pytest.raises(AiakqError, match=f"the last {shared} layers share keys and values") as caught:
            ModelConfig.from_hf({**GEMMA, "num_kv_shared_layers": shared})
        assert caught.value.id == "model_malformed"


def test_attention_in_both_directions_is_refused_for_text_only() -> None:
    assert ModelConfig.from_hf({**GEMMA, "use_bidirectional_attention": "vision"}).num_layers == 8
    with pytest.raises(AiakqError, match="use_bidirectional_attention") as caught:
        ModelConfig.from_hf({**GEMMA, "use_bidirectional_attention": "all"})
    assert caught.value.id == "config_key_unsupported"
