"""Which keys of config.json are computed with, which have no effect, and which are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from tiny_models import TINY

from aiakq.errors import AiakqError
from aiakq.runtime.config.family_keys import REQUIRED
from aiakq.runtime.config.known_keys import FAMILIES, WITHOUT_EFFECT, completed, without_effect
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.hf.mimo import register_mimo
from aiakq.runtime.models import ARCHITECTURES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 320,
}


def read(**values: Any) -> dict[str, Any]:
    return dict(ModelConfig.from_hf({**LLAMA, **values}).raw)


def refused(**values: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf({**LLAMA, **values})
    assert "\n" not in str(caught.value)
    return caught.value


def native_kinds() -> list[str]:
    return sorted({TINY[name][0] for name in ARCHITECTURES if name in TINY and TINY[name][0] in FAMILIES})


@pytest.mark.parametrize("kind", native_kinds())
def test_the_table_of_a_family_is_that_of_transformers_class(kind: str) -> None:
    """A key that a new version of transformers adds has to be decided on: computed with, fixed or without effect."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    register_mimo()
    family, cls = FAMILIES[kind], CONFIG_MAPPING[kind]
    common = {each.name for each in dataclasses.fields(PretrainedConfig)}
    of_class: dict[str, Any] = {}
    for each in dataclasses.fields(cls):
        if each.name not in common:
            has_default = each.default is not dataclasses.MISSING
            of_class[each.name] = each.default if has_default else each.default_factory()
    decided = {*family.defaults, *family.fixed, *family.aliases, *family.unread, *REQUIRED, "rope_parameters"}
    undecided = [name for name in of_class if name not in decided and without_effect(name) is None]
    assert undecided == []
    different = {
        name: (value, of_class[name])
        for name, value in family.defaults.items()
        if name in of_class and of_class[name] != value
    }
    assert different == {}


def test_a_key_left_out_has_the_default_of_transformers_class() -> None:
    assert ModelConfig.from_hf(LLAMA).norm_eps == 1e-6
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "model_type": "mistral"}
    assert ModelConfig.from_hf(mistral).num_kv_heads == 8
    assert ModelConfig.from_hf({**mistral, "num_key_value_heads": None}).num_kv_heads == 16
    phi = ModelConfig.from_hf({**LLAMA, "architectures": ["PhiForCausalLM"], "model_type": "phi"})
    assert phi.rope["partial_rotary_factor"] == 0.5 and phi.activation == "gelu_new"
    oss = ModelConfig.from_hf({**LLAMA, "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2,
                               "model_type": "gpt_oss"})  # fmt: skip
    assert oss.rope["rope_type"] == "yarn" and oss.rope["factor"] == 32.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.5),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.01),
        ("use_qk_norm", True),
        ("qk_layernorm", True),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 256),
        ("clip_qkv", 8.0),
        ("no_rope_layers", [1, 1, 0]),
        ("layer_types", ["full_attention"] * 3),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("mup_base_width", 256),
        ("mup_enabled", True),
        ("scale_emb", 12),
        ("scale_depth", 1.4),
        ("dim_model_base", 256),
        ("rotary_pct", 0.25),
        ("rope_interleaved", True),
        ("is_causal", False),
        ("use_bidirectional_attention", True),
        ("norm_type", "layernorm"),
        ("use_rmsnorm", False),
        ("alibi", True),
        ("attn_config", {"alibi": True}),
        *(("embedding_multiplier", 0), ("residual_scale", 0.0), ("attention_temperature", 0), ("mup_alpha", 0.0)),
        *(("rotary_ndims", 0), ("rope_fraction", 0.0), ("use_rope", False), ("use_rotary_emb", 0), ("causal", 0)),
        *(
            ("unidirectional", False),
            ("use_swiglu", False),
            ("gated_mlp", 0),
            ("pre_norm", False),
            ("tie_weights", False),
        ),
        *(
            ("scale_attn_weights", False),
            ("layer_norm_epsilon", 0),
            ("ln_eps", 0.0),
            ("scale_depth", 0),
            ("scale_depth", 1),
        ),
        ("some_new_key", 2.0),
        ("another_new_key", "on"),
        ("is_encoder_decoder", True),
    ],
)
def test_a_key_that_may_change_the_arithmetic_is_refused_by_name(key: str, value: Any) -> None:
    problem = refused(**{key: value})
    assert problem.id == "config_key_unsupported"
    assert key in str(problem) and repr(value)[:40] in str(problem)
    assert f'{{"{key}": null}}' in str(problem)
    read(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_name_or_path", "someone/model"),
        ("transformers_version", "4.40.0"),
        ("attention_dropout", 0.1),
        ("resid_pdrop", 0.1),
        ("initializer_range", 0.02),
        ("pretraining_tp", 2),
        ("use_cache", False),
        ("unsloth_fixed", True),
        ("unsloth_version", "2024.9"),
        ("bos_token_id", 3),
        ("id2label", {"0": "LABEL_0"}),
        ("task_specific_params", {"text-generation": {"max_length": 50}}),
        ("torch_dtype", "bfloat16"),
        ("_attn_implementation_autoset", True),
        ("router_aux_loss_coef", 0.01),
        ("max_sequence_length", 2048),
        ("tokenizer_class", "LlamaTokenizer"),
        ("rope_interleaved", False),
        ("use_sliding_window", False),
        ("sliding_window", None),
        ("logit_scale", 1.0),
        ("residual_multiplier", 1),
        ("some_new_key", None),
        ("some_new_key", False),
        ("some_new_key", 0),
        *(("attn_logit_softcapping", 0.0), ("clip_qkv", None), ("local_attention_window", 0), ("num_extra_layers", 0)),
        *(("use_depth_scaling", False), ("some_multiplier", None), ("epsilon_cutoff", 0.0)),
    ],
)
def test_a_key_without_effect_is_left_alone(key: str, value: Any) -> None:
    assert read(**{key: value})[key] == value


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "num_key_value_heads", "head_dim"])
def test_sizes_and_bases_of_0_are_malformed(key: str) -> None:
    assert refused(**{key: 0}).id == "model_malformed"
    assert refused(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0})


def test_0_and_false_are_refused_where_a_family_computes_with_something_else() -> None:
    for architecture, kind in (("MixtralForCausalLM", "mixtral"), ("GptOssForCausalLM", "gpt_oss")):
        config = {"architectures": [architecture], "model_type": kind, "num_key_value_heads": 2}
        assert refused(**config, norm_topk_prob=False).id == "config_key_unsupported"
        read(**config, norm_topk_prob=True)
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_key_value_heads": 2}
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert refused(**gemma, **{cap: 0.0}).id == "config_key_unsupported"
        read(**gemma, **{cap: None})
    falcon = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "new_decoder_architecture": True}
    assert refused(**falcon, num_ln_in_parallel_attn=0).id == "config_key_unsupported"


def test_what_kimi_linear_says_of_its_layers_is_read_from_one_object() -> None:
    kimi = {**LLAMA, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_key_value_heads": 4}
    stated = {"num_heads": 5, "head_dim": 24, "short_conv_kernel_size": 3}
    layers = {"kda_layers": [1, 3], "full_attn_layers": [2]}
    model = ModelConfig.from_hf({**kimi, "linear_attn_config": {**stated, **layers}, "model_max_length": 77})
    assert model.layer_kinds == ("linear_attention", "full_attention", "linear_attention") and model.max_position == 77
    sizes = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    assert [model.raw[name] for name in sizes] == [5, 24, 3]
    implied = ModelConfig.from_hf({**kimi, "num_hidden_layers": 6}).layer_kinds
    assert [layer for layer, each in enumerate(implied) if each == "full_attention"] == [4]
    for wrong in ({"gate_lower_bound": -5.0}, {"use_full_rank_gate": True}):
        problem = refused(**kimi, linear_attn_config={**stated, **layers, **wrong})
        assert problem.id == "config_key_unsupported" and next(iter(wrong)) in str(problem)
    for wrong in ({"kda_layers": [1]}, {"kda_layers": [1, "3"]}, {"num_heads": 0}, {"short_conv_kernel_size": 1}):
        assert refused(**kimi, linear_attn_config={**stated, **layers, **wrong}).id == "model_malformed"
    assert refused(**kimi, linear_attn_config=[1]).id == "model_malformed"
    assert refused(**kimi, mla_use_nope=False).id == "config_key_unsupported"


def test_sizes_of_layers_that_a_family_does_not_have_are_left_out() -> None:
    """Their tensors would be missing in the model; the loader compares them."""
    assert "num_experts" not in read(num_experts=8)
    falcon = {**LLAMA, "architectures": ["FalconForCausalLM"], "model_type": "falcon", "intermediate_size": 7}
    assert ModelConfig.from_hf(falcon).intermediate_size == 4 * 64


def test_other_spellings_of_a_key_are_read() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
    assert ModelConfig.from_hf({**gpt2, "num_hidden_layers": 2, "max_position_embeddings": 77}).max_position == 77
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 4}
    assert ModelConfig.from_hf({**mixtral, "num_experts": 5}).raw["num_local_experts"] == 5
    with pytest.raises(AiakqError, match="num_experts is 5, but num_local_experts, which means the same, is 6"):
        ModelConfig.from_hf({**mixtral, "num_experts": 5, "num_local_experts": 6})


def test_a_switch_of_falcons_authors_is_read_if_it_is_off() -> None:
    """Their published files have it; transformers' class does not."""
    published = {
        **{name: value for name, value in LLAMA.items() if name != "architectures"},
        **{"model_type": "falcon", "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    }
    switch = "apply_residual_connection_post_layernorm"
    assert completed({**published, switch: False}, "FalconForCausalLM")["alibi"]
    with pytest.raises(AiakqError, match=f"{switch} = True"):
        completed({**published, switch: True}, "FalconForCausalLM")


def test_two_families_in_one_file_are_refused() -> None:
    problem = refused(model_type="mistral")
    assert problem.id == "config_key_unsupported" and "LlamaForCausalLM" in str(problem)
    assert completed({**LLAMA, "model_type": "kimi_of_its_own"}, "DeepseekV3ForCausalLM")["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("attention_bias", ["no", "false", 1, [], {}, None]),
        ("rms_norm_eps", ["1e-6", [1e-6], {}, True, None, float("nan"), float("inf")]),
        ("hidden_act", [7, ["silu"], None, True]),
        ("intermediate_size", ["128", 12.5, [128], True]),
        ("tie_word_embeddings", ["yes", 1, [], None]),
        ("max_position_embeddings", ["2048", 2048.5, True]),
    ],
)
def test_a_value_of_another_type_is_named(key: str, values: list[Any]) -> None:
    for value in values:
        problem = refused(**{key: value})
        assert problem.id == "model_malformed" and key in str(problem), value


def test_settings_of_mamba_authors_that_are_not_its_own_are_refused() -> None:
    mamba = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "num_attention_heads": None}
    read(**mamba, ssm_cfg={})
    problem = refused(**mamba, ssm_cfg={"layer": "Mamba2"})
    assert problem.id == "config_key_unsupported" and "ssm_cfg" in str(problem)


def test_layers_of_another_kind_are_refused() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 4}
    problem = refused(**qwen, layer_types=["full_attention", "linear_attention", "full_attention"])
    assert problem.id == "config_key_unsupported" and "layer_types" in str(problem)


def test_every_pattern_of_keys_without_effect_is_given_once() -> None:
    patterns = [pattern for each in WITHOUT_EFFECT.values() for pattern in each]
    assert sorted(patterns) == sorted(set(patterns))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name in TINY])
def test_what_transformers_saves_is_understood(architecture: str) -> None:
    """Its files have the derived values and the defaults of all keys."""
    from transformers import CONFIG_MAPPING

    register_mimo()
    kind, values = TINY[architecture]
    saved = json.loads(CONFIG_MAPPING[kind](**values).to_json_string(use_diff=False))
    assert ModelConfig.from_hf({**saved, "architectures": [architecture]}).architecture == architecture


def test_keys_of_rotary_parameters_and_of_attention_are_refused_too() -> None:
    for key in ("rope_scaling", "rope_parameters"):
        problem = refused(**{key: {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}})
        assert problem.id == "config_key_unsupported" and "alpha" in str(problem) and key in str(problem)
    read(rope_scaling={"rope_type": "linear", "factor": 2.0, "alpha": None, "finetuned": True})
    mpt = {"architectures": ["MptForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 9}
    ModelConfig.from_hf({**mpt, "attn_config": {"attn_impl": "triton", "alibi": True, "kv_n_heads": None}})
    with pytest.raises(AiakqError, match="kv_n_heads"):
        ModelConfig.from_hf({**mpt, "attn_config": {"alibi": True, "kv_n_heads": 1}})


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name in TINY])
def test_hostile_values_are_named(architecture: str) -> None:
    """Every key of every family, with values of every wrong kind: read, or refused in one line."""
    kind, values = TINY[architecture]
    config = {"architectures": [architecture], "model_type": kind, **values}
    keys = {*FAMILIES[kind].defaults, *FAMILIES[kind].aliases, *values, "rope_parameters", "rope_scaling", "rope_theta"}
    hostile = [math.nan, math.inf, -1, 2**70, 10**400, "7", True, [], [[1]], {"a": [None]}, -0.5, "x" * 10_000, None]
    for key in sorted(keys):
        for value in hostile:
            try:
                ModelConfig.from_hf({**config, key: value})
            except AiakqError as problem:
                assert len(str(problem)) < 600 and "\n" not in str(problem), (key, value)


def test_a_switch_of_qwens_authors_is_read_if_it_is_off() -> None:
    raw = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2}
    raw |= {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert ModelConfig.from_hf({**raw, "use_mrope": False}).num_layers == 2
    with pytest.raises(AiakqError, match="use_mrope = True"):
        ModelConfig.from_hf({**raw, "use_mrope": True})


def test_mimos_file_is_read_as_its_authors_class_computes_it() -> None:
    """A published file, with smaller sizes: attention_bias is what Qwen2's class computes anyway."""
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.X"},
    }
    raw |= {"attention_bias": True, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64}
    raw |= {"intermediate_size": 96, "max_position_embeddings": 32768, "max_window_layers": 36, "rms_norm_eps": 1e-5}
    raw |= {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    raw |= {"rope_scaling": None, "rope_theta": 640000, "sliding_window": None, "tie_word_embeddings": False}
    raw |= {"use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 320}
    model = ModelConfig.from_hf(raw)
    assert model.rope["rope_theta"] == 640000 and model.layer_kinds == ("full_attention",) * 2
    with pytest.raises(AiakqError, match="attention_bias = False"):
        ModelConfig.from_hf({**raw, "attention_bias": False})


def test_layers_of_mimo_v2_flash_with_a_window_have_twice_the_key_heads() -> None:
    raw = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_hidden_layers": 7}
    raw |= {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 320}
    model = ModelConfig.from_hf(raw)
    assert [layer for layer, kind in enumerate(model.layer_kinds) if kind == "full_attention"] == [0, 5]
    assert model.layer_heads == dict.fromkeys((1, 2, 3, 4, 6), (24, 4)) and model.sliding_windows[1] == 129
    for changes in ({"num_key_value_heads": 8}, {"rope_theta": 5e6}, {"add_full_attention_sink_bias": True}):
        with pytest.raises(AiakqError):
            ModelConfig.from_hf({**raw, **changes})
