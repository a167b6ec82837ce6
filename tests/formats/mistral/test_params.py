"""params.json: what is translated, and what is refused by name."""

from __future__ import annotations

import pytest
from mistral_files import PARAMS

from aiakq.errors import AiakqError
from aiakq.formats.mistral.params import config_of


def test_a_config_is_translated():
    config = config_of({**PARAMS, "sliding_window": 64, "max_batch_size": 1, "lora": None})
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert {key: config[key] for key in ("model_type", "hidden_size", "head_dim", "sliding_window")} == {
        "model_type": "mistral",
        "hidden_size": 64,
        "head_dim": 32,
        "sliding_window": 64,
    }
    assert config["max_position_embeddings"] == 256 and config["tie_word_embeddings"] is False


def test_yarn_has_the_names_of_hugging_face():
    yarn = {"factor": 16, "original_max_position_embeddings": 8192, "beta": 32, "alpha": 1, "apply_scale": False}
    scaling = {"original_max_position_embeddings": 8192, "beta": 0.1}
    config = config_of({**PARAMS, "yarn": yarn, "llama_4_scaling": scaling})
    assert config["model_type"] == "ministral3" and config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


def test_windows_may_repeat():
    config = config_of({**PARAMS, "n_layers": 4, "sliding_window": [None, 32]})
    assert config["model_type"] == "ministral" and config["sliding_window"] == 32
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert config_of({**PARAMS, "sliding_window": [32, 32]})["sliding_window"] == 32
    assert config_of({**PARAMS, "sliding_window": [None]})["sliding_window"] is None


def test_mistral_7b_v01_has_the_rotary_base_of_its_time():
    params = {key: value for key, value in PARAMS.items() if key != "rope_theta"}
    assert config_of({**params, "sliding_window": 4096})["rope_parameters"]["rope_theta"] == 10000.0
    with pytest.raises(AiakqError, match="no rope_theta"):
        config_of(params)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vision_encoder": {"hidden_size": 8}}, "vision_encoder"),
        ({"multimodal": {"whisper_model_args": {}}}, "multimodal"),
        ({"kv_lora_rank": 512}, "compresses keys and values"),
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "shared experts"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "renorm_strategy": "X"}}, "moe.renorm_strategy"),
        ({"yarn": {"factor": 2, "original_max_position_embeddings": 8, "gamma": 2}}, "yarn.gamma"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1}}, "llama_4_scaling without yarn"),
        ({"ada_rms_norm_t_cond": True}, "ada_rms_norm_t_cond"),
        ({"sliding_window": [None, 4, 8]}, "sliding_window"),
        ({"sliding_window": [[1]]}, "sliding_window"),
        ({"norm_eps": 10**400}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 1e-320}, "rope_theta"),
        ({"dim": "64"}, "dim is '64'"),
        ({"n_layers": None}, "n_layers is missing"),
        ({"n_heads": 2**63}, "n_heads"),
        ({"n_heads": 7, "n_kv_heads": 7, "head_dim": None}, "params.json"),
        ({"n_heads": 7, "n_kv_heads": 2}, "params.json"),
        ({"moe": 3}, "moe is 3"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, said):
    with pytest.raises(AiakqError) as refused:
        config_of({**PARAMS, **changes})
    assert said in str(refused.value)
