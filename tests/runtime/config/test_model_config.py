"""The numbers of config.json: impossible ones are refused by name, and so are architectures without them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiakq.errors import BAD_INPUT, AiakqError
from aiakq.runtime.config.model import ModelConfig, check_sizes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 320,
}


#: A family with sliding windows.
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


def refused(**values: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf({**QWEN2, **values})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == BAD_INPUT
    return caught.value


@pytest.mark.parametrize(
    "key",
    ["sliding_window", "head_dim", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"],
)
@pytest.mark.parametrize("value", ["4", 1.5, [4], {"a": 1}, True, -1, 2**31, 10**400, math.nan])
def test_numbers_are_positive_integers_of_a_possible_size(key: str, value: Any) -> None:
    problem = refused(**{key: value})
    assert problem.id == "model_malformed"
    assert key in str(problem)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("layer_types", ["sliding_attention", {"a": 1}, [1, 2, 3], ["sliding_attention"], 3, True]),
        ("max_window_layers", ["2", 1.5, -1, True, [1]]),
        ("rms_norm_eps", ["1e-5", math.nan, math.inf, -1.0, 1.0, [1e-5]]),
        ("rope_scaling", ["linear", [1], 2.0]),
        ("rope_parameters", ["linear", [1], 2.0]),
        ("architectures", ["LlamaForCausalLM", [7], {"a": 1}]),
    ],
)
def test_other_values_are_of_their_type(key: str, values: list[Any]) -> None:
    for value in values:
        problem = refused(**{"sliding_window": 8, "use_sliding_window": True, key: value})
        assert problem.id == "model_malformed", value


def test_more_heads_than_hidden_size_need_a_head_dim() -> None:
    """Also in the config of an EAGLE-3 head, which ended the start with a traceback."""
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128}
    assert "128 attention heads cannot share hidden_size 64" in str(refused(**heads))
    assert ModelConfig.from_hf({**LLAMA, **heads, "head_dim": 8}).head_dim == 8


@pytest.mark.parametrize("kinds", [[], ["full_attention"] * 2, ["full_attention"] * 4])
def test_layer_types_has_one_entry_per_layer(kinds: list[str]) -> None:
    with pytest.raises(AiakqError, match=f"layer_types has {len(kinds)} entries, but the model has 3 layers"):
        ModelConfig.from_hf({**QWEN2, "layer_types": kinds})


@pytest.mark.parametrize("model", ["Qwen2", "Qwen3", "Qwen2Moe", "SmolLM3"])
@pytest.mark.parametrize("off", [{"use_sliding_window": False}, {"sliding_window": None, "use_sliding_window": True}])
def test_layers_with_a_window_need_one(model: str, off: dict[str, Any]) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(AiakqError, match="sliding_window"):
        ModelConfig.from_hf({**QWEN2, "architectures": [f"{model}ForCausalLM"], "layer_types": kinds, **off})


@pytest.mark.parametrize("model", ["Phi3", "Mistral", "Gemma2", "Mixtral"])
def test_windows_are_not_turned_off_by_a_key_that_their_family_does_not_read(model: str) -> None:
    config = {**QWEN2, "architectures": [f"{model}ForCausalLM"], "use_sliding_window": False}
    with pytest.raises(AiakqError, match="use_sliding_window.*uses it nevertheless"):
        ModelConfig.from_hf({**config, "sliding_window": 8})
    assert ModelConfig.from_hf({**config, "sliding_window": None, "layer_types": None}).sliding_windows == (None,) * 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 attention heads cannot share hidden_size 64"),
        ({"head_dim": 33}, "head_dim is 33"),
    ],
    ids=str,
)
def test_sizes_that_transformers_refuses_are_refused(changes: dict[str, Any], said: str) -> None:
    assert said in str(refused(**changes))


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ([[["sparse"], 3]], "attention_types is"),
        ("global", "attention_types is 'global', not a list of [names, times]"),
        ([[["global"], 2]], "another number of layers than 3"),
        ([[["global"], 10**12]], "another number of layers than 3"),
    ],
)
def test_attention_types_of_gpt_neo_are_checked(types: Any, said: str) -> None:
    config = LLAMA | {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "attention_types": types}
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf(config)
    assert said in str(caught.value)


def test_layer_types_of_lfm2_moe_are_needed() -> None:
    with pytest.raises(AiakqError, match="layer_types is missing"):
        ModelConfig.from_hf(LLAMA | {"architectures": ["Lfm2MoeForCausalLM"], "num_key_value_heads": 2})


def test_windows_are_per_layer() -> None:
    def windows(model: str = "Qwen2", **values: Any) -> tuple[int | None, ...]:
        return ModelConfig.from_hf({**QWEN2, "architectures": [f"{model}ForCausalLM"], **values}).sliding_windows

    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Mixtral") == windows("Mistral", sliding_window=None) == (None, None, None)
    assert windows("Mistral", sliding_window=8) == (8, 8, 8)
    assert windows("Mistral") == (4096, 4096, 4096), "the default of transformers' class"
    assert windows("Gemma2", sliding_window=8, layer_types=kinds[:3]) == (None, 8, None)
    assert windows() == windows(sliding_window=8, use_sliding_window=False) == (None, None, None)
    assert windows(sliding_window=8, use_sliding_window=True, max_window_layers=2) == (None, None, 8)
    assert windows("Qwen3Moe", sliding_window=8, use_sliding_window=True, max_window_layers=2) == (8, 8, 8)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"architectures": ["RwkvForCausalLM"], "hidden_size": 64, "n_layer": 2, "vocab_size": 9}, "num_attention"),
        (
            {
                "architectures": ["ChatGLMModel"],
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_layers": 2,
                "padded_vocab_size": 9,
                "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
            },
            "vocab_size",
        ),
    ],
)
def test_an_architecture_without_these_numbers_is_named(config: dict[str, Any], missing: str) -> None:
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf(config)
    assert caught.value.id == "architecture_unsupported"
    said = str(caught.value)
    assert config["architectures"][0] in said and missing in said
    assert ("Python code" in said) == ("auto_map" in config)


def test_sizes_are_checked_before_transformers_builds_a_model_of_them() -> None:
    """Building two billion layers takes too long even without weights."""
    check_sizes(LLAMA, 30)
    check_sizes({**LLAMA, "num_experts": 0, "num_key_value_heads": None}, 30)
    for values in (
        {"num_hidden_layers": 31},
        {"n_layers": 2**31},
        {"hidden_size": 0},
        {"vocab_size": 10**400},
        {"text_config": {"num_hidden_layers": 31}},
    ):
        with pytest.raises(AiakqError) as caught:
            check_sizes({**LLAMA, **values}, 30)
        assert caught.value.id == "model_malformed"


@pytest.mark.parametrize("name", ["BloomForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "MptForCausalLM"])
def test_classes_without_shared_heads_ignore_what_the_config_says_of_them(name: str) -> None:
    assert ModelConfig.from_hf({**LLAMA, "architectures": [name], "num_key_value_heads": 2}).num_kv_heads == 4


NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_pattern_of_letters_lists_the_layers_of_nemotron_h() -> None:
    kinds = ("linear_attention", "full_attention", "mlp", "moe")
    assert ModelConfig.from_hf({**NEMOTRON, "hybrid_override_pattern": "M*-E"}).layer_kinds == kinds
    config = ModelConfig.from_hf({**NEMOTRON, "layers_block_type": list(kinds), "num_hidden_layers": 4})
    assert config.layer_kinds == kinds and config.is_recurrent and config.has_positions
    assert not ModelConfig.from_hf({**NEMOTRON, "hybrid_override_pattern": "M-"}).has_positions
    for wrong, message in (
        ({}, "layers_block_type"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "2 kinds of layers are listed"),
        ({"hybrid_override_pattern": "M", "time_step_limit": [0.1, 0.2]}, "time_step_limit"),
    ):
        with pytest.raises(AiakqError, match=message):
            ModelConfig.from_hf({**NEMOTRON, **wrong})
