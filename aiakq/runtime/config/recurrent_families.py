"""The keys of further families with recurrent layers, see family_keys.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiakq.formats.config_values import OBJECT, SIZE, malformed, read_value
from aiakq.runtime.config.family_keys import ATTENTION_BIAS, RECURRENT, Family, llama_keys
from aiakq.runtime.config.sparse_families import MAMBA

#: Letters of ``hybrid_override_pattern``, by which Nemotron-H's files list their layers.
PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def kimi_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``raw`` of Kimi Linear with the sizes and kinds of layers that are in ``linear_attn_config``.

    Raises ``model_malformed``.
    """
    given = raw.get("linear_attn_config") or {}
    config = {**raw, "linear_attn_config": read_value({"linear_attn_config": given}, OBJECT, "linear_attn_config")}
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    for name, key in (names | {"short_conv_kernel_size": "linear_conv_kernel_dim"}).items():
        config[key] = read_value(given, SIZE, name, default=config[key])
    if config["linear_conv_kernel_dim"] < 2:
        raise malformed("linear_conv_kernel_dim", config["linear_conv_kernel_dim"])
    if config.get("layer_types") is not None:
        return config
    layers = read_value(raw, SIZE, "num_hidden_layers")
    if "kda_layers" not in given or "full_attn_layers" not in given:
        every = [
            "linear_attention" if layer % 4 or not layer else "full_attention" for layer in range(min(layers, 10_000))
        ]
        return {**config, "layer_types": every}
    numbers = {name: given[f"{name}_layers"] for name in ("kda", "full_attn")}
    listed = [number for each in numbers.values() if isinstance(each, list) for number in each]
    if any(type(number) is not int for number in listed) or sorted(listed) != list(range(1, len(listed) + 1)):
        raise malformed("linear_attn_config", numbers, "the numbers of all layers")
    kinds = ["linear_attention" if number in set(numbers["kda"]) else "full_attention" for number in sorted(listed)]
    return {**config, "layer_types": kinds}


def recurrent_gemma_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``raw`` of RecurrentGemma with the kinds of layers, which repeat ``block_types``, the window of those with
    attention, and the length of the texts of its training, which files leave out (arXiv:2402.19427).

    Raises ``model_malformed``.
    """
    kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
    blocks = raw["block_types"]
    if not isinstance(blocks, list | tuple) or not blocks or any(block not in kinds for block in blocks):
        raise malformed("block_types", blocks, f"a list of {' and '.join(kinds)}")
    layers = min(read_value(raw, SIZE, "num_hidden_layers"), 10_000)
    return {
        **raw,
        "layer_types": [kinds[blocks[layer % len(blocks)]] for layer in range(layers)],
        "sliding_window": read_value(raw, SIZE, "attention_window_size"),
        "max_position_embeddings": raw.get("max_position_embeddings") or 8192,
    }


#: Mamba's keys; transformers' class has no intermediate_size, but lets files set it.
_SELECTIVE: dict[str, object] = {
    "intermediate_size": None,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}
#: Of Mamba: what only fresh weights depend on, how transformers computes prompts, and spellings of the authors' code.
_SELECTIVE_UNREAD = frozenset(
    {
        *("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
        *("d_inner", "d_model", "n_layer"),
    }
)

#: Factors of residuals and outputs of MiniMax-01's layers.
_FACTORS: dict[str, Any] = {
    f"{part}_{name}_factor": 1.0 for part in ("full_attn", "linear_attn", "mlp") for name in ("alpha", "beta")
}

RECURRENT_FAMILIES: dict[str, Family] = {
    "lfm3": Family(
        llama_keys(
            ("rms_norm_eps", "hidden_act"),
            intermediate_size=7680,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=128000,
            norm_eps=1e-5,
            tie_word_embeddings=True,
            conv_bias=False,
            conv_L_cache=7,
            sliding_window=256,
            layer_types=None,
            use_sandwich_norm=True,
            use_attention_gate=True,
            **ATTENTION_BIAS,
        ),
        aliases={"rms_norm_eps": "norm_eps"},
        fixed=dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"), ()),
        theta=1e6,
        kinds=frozenset({"conv", "sliding_attention"}),
    ),
    "recurrent_gemma": Family(
        {
            "intermediate_size": 7680,
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "attention_window_size": 2048,
            "block_types": ("recurrent", "recurrent", "attention"),
            "lru_width": None,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "tie_word_embeddings": True,
            **ATTENTION_BIAS,
        },
        aliases={"sliding_window": "attention_window_size", "_block_types": "block_types"},
        rotated=0.5,
        kinds=RECURRENT | {"sliding_attention"},
    ),
    "mamba": Family(
        _SELECTIVE,
        fixed={"rms_norm": (True,), "ssm_cfg": ({},)},
        unread=_SELECTIVE_UNREAD,
        rotary=False,
        kinds=RECURRENT,
    ),
    "falcon_mamba": Family(
        {**_SELECTIVE, "mixer_rms_eps": 1e-6}, unread=_SELECTIVE_UNREAD, rotary=False, kinds=RECURRENT
    ),
    "jamba": Family(
        llama_keys(
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=262144,
            num_experts_per_tok=2,
            num_experts=16,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank="auto",
            mamba_conv_bias=True,
            mamba_proj_bias=False,
        ),
        aliases={"num_local_experts": "num_experts"},
        fixed={"mamba_inner_layernorms": (True,)},
        unread=frozenset({"use_mambapy", "use_associative_scan", "calc_logits_for_entire_prompt"}),
        rotary=False,
        kinds=RECURRENT,
    ),
    "minimax": Family(
        llama_keys(
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            num_experts_per_tok=2,
            num_local_experts=8,
            layer_types=None,
            rotary_dim=None,
            **_FACTORS,
        ),
        aliases={"num_experts": "num_local_experts"},
        fixed={
            "sliding_window": (),
            "norm_topk_prob": (True,),
            "postnorm": (True,),
            "shared_intermediate_size": (0,),
        },
        unread=frozenset({"block_size", "attn_type_list", "shared_moe_mode"}),
        theta=1e6,
        kinds=RECURRENT,
    ),
    "olmo_hybrid": Family(
        llama_keys(
            max_position_embeddings=65536,
            layer_types=None,
            linear_num_key_heads=None,
            linear_num_value_heads=None,
            linear_key_head_dim=None,
            linear_value_head_dim=None,
            linear_conv_kernel_dim=4,
            linear_allow_neg_eigval=True,
            **ATTENTION_BIAS,
        ),
        unread=frozenset({"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"}),
        kinds=RECURRENT,
    ),
    "falcon_h1": Family(
        llama_keys(
            intermediate_size=14336,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            mlp_bias=False,
            projectors_bias=False,
            mamba_d_ssm=1024,
            mamba_norm_before_gate=True,
            mamba_rms_norm=False,
            mlp_multipliers=None,
            ssm_multipliers=None,
            lm_head_multiplier=1.0,
            embedding_multiplier=1.0,
            key_multiplier=1.0,
            attention_in_multiplier=1.0,
            attention_out_multiplier=1.0,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=1.0,
            **ATTENTION_BIAS,
            **MAMBA,
        ),
        fixed={"mamba_use_mlp": (True,), "attn_layer_indices": ()},
        unread=frozenset({"mlp_expansion_factor"}),
        kinds=frozenset({"hybrid"}),
    ),
    "nemotron_h": Family(
        {
            "layer_types": None,
            "hybrid_override_pattern": None,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "use_bias": False,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        aliases={
            "layers_block_type": "layer_types",
            "num_local_experts": "n_routed_experts",
            "attention_head_dim": "head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_min": "time_step_min",
            "mamba_conv_bias": "use_conv_bias",
        },
        fixed={
            "attention_bias": (False,),
            "mamba_proj_bias": (False,),
            "mamba_hidden_act": ("silu",),
            "sliding_window": (),
            "n_shared_experts": (1,),
            # transformers computes with time_step_min instead
            **dict.fromkeys(("time_step_limit", "mamba_dt_limit"), ((0.0, math.inf), [0.0, math.inf])),
        },
        unread=frozenset(
            {
                *("expand", "mamba_expand", "mamba_dt_max", "mamba_dt_init_floor", "mamba_ssm_cache_dtype"),
                *("moe_shared_expert_overlap", "rope_theta", "partial_rotary_factor"),
            }
        ),
        rotary=False,
        kinds=frozenset({"linear_attention", "mlp", "moe"}),
    ),
    "zamba": Family(
        {
            "layer_types": None,
            "num_key_value_heads": 16,
            "head_dim": None,
            "attention_hidden_size": None,
            "max_position_embeddings": 4096,
            "intermediate_size": 14848,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "attn_layer_period": 6,
            "attn_layer_offset": 4,
            "n_mamba_heads": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        aliases={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
        fixed={"hidden_mamba_act": ("silu",)},
        unread=frozenset({"use_associative_scan"}),
        rotary=False,
        kinds=frozenset({"linear_attention", "hybrid"}),
    ),
    "zamba2": Family(
        {
            "layer_types": None,
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 4096,
            "intermediate_size": None,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "time_step_min": 0.001,
            "add_bias_linear": False,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "adapter_rank": 128,
            "use_mem_rope": False,
        },
        aliases={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
        # with it, transformers and the authors' code compute different frequencies
        fixed={"use_long_context": (False,), "time_step_limit": ((0.0, math.inf), [0.0, math.inf])},
        unread=frozenset(
            {
                *("attention_hidden_size", "mamba_headdim", "kv_channels", "num_query_groups", "hybrid_layer_ids"),
                *("ffn_hidden_size", "use_conv_bias", "use_mem_eff_path", "chunk_size", "use_shared_mlp_adapter"),
                *("use_shared_block_lora", "gated_linear_unit"),
            }
        ),
        kinds=frozenset({"linear_attention", "hybrid"}),
    ),
}
