"""The families of llama.cpp with experts, see dense.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.gguf_model.dense import (
    HEAD_NORMS,
    LLAMA_PERMUTED,
    MLP,
    NORMS,
    OUTER,
    PERMUTED,
    PROJECTIONS,
    attention_biases,
    granite,
    llama,
)
from aiakq.formats.gguf_model.family import GGUFFamily, GGUFModel, Table, per_layer_windows
from aiakq.formats.gguf_model.keys import unsupported
from aiakq.formats.gguf_model.rules import (
    Bare,
    Combined,
    ExpertHalves,
    Reshaped,
    StackedExperts,
    Unread,
    halves,
    side_by_side,
)

_PARTS = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj", "mlp.experts.{expert}.down_proj")
#: StackedExperts that have tensors of their own in the checkpoint.
EXPERTS: Table = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": StackedExperts(_PARTS[0]),
    "ffn_up_exps": StackedExperts(_PARTS[1]),
    "ffn_down_exps": StackedExperts(_PARTS[2]),
    "ffn_gate_up_exps": ExpertHalves(*_PARTS[:2]),
}
_LLAMA4_PARTS = tuple(f"feed_forward.experts.{{expert}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
_MIXTRAL_PARTS = tuple(f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("w1", "w3", "w2"))
_MIXTRAL: Table = {
    **NORMS,
    **PERMUTED,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": StackedExperts(_MIXTRAL_PARTS[0]),
    "ffn_up_exps": StackedExperts(_MIXTRAL_PARTS[1]),
    "ffn_down_exps": StackedExperts(_MIXTRAL_PARTS[2]),
    "ffn_gate_up_exps": ExpertHalves(*_MIXTRAL_PARTS[:2]),
    # Each expert in a tensor of its own, as in files of 2023: ``ffn_gate.3``.
    "ffn_gate.{expert}": _MIXTRAL_PARTS[0],
    "ffn_up.{expert}": _MIXTRAL_PARTS[1],
    "ffn_down.{expert}": _MIXTRAL_PARTS[2],
}
_SHARED: Table = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": Bare("mlp.gate.e_score_correction_bias", "bias"),
}


def _experts(model: GGUFModel) -> tuple[int, int]:
    """Return the number of experts, and of those that are used for a token."""
    return model.keys.integer("expert_count"), model.keys.integer("expert_used_count")


def llama_or_mixtral(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Llama, Mistral, and Mixtral if there are experts."""
    if not model.keys.integer("expert_count", 0, low=0):
        return llama(model, config)
    count, used = _experts(model)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "sliding_window": model.keys.integer("attention.sliding_window", None, low=0) or None,
    }


def qwen2_moe(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Qwen 1.5 and 2 with experts."""
    keys = model.keys
    count, used = _experts(model)
    shared = keys.integer("expert_shared_feed_forward_length", None)
    inside = model.shapes.get("blk.0.ffn_gate_exps.weight", (0, 0, 0))
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", inside[1]),
        "shared_expert_intermediate_size": shared or model.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "head_dim": None,
    }


def qwen3_moe(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Qwen 3 with experts."""
    count, used = _experts(model)
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": model.keys.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": model.keys.flag("expert_weights_norm", True),
        "attention_bias": False,
    }


def olmoe(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """OLMoE."""
    count, used = _experts(model)
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "norm_topk_prob": False,
        "clip_qkv": model.keys.number("attention.clamp_kqv", None) or None,
        "attention_bias": False,
        "head_dim": None,
    }


def granite_moe(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Granite with experts. Raises ``gguf_unsupported`` for shared ones."""
    if model.keys.integer("expert_shared_feed_forward_length", 0, low=0):
        raise unsupported("a GGUF file of a Granite with shared experts")
    count, used = _experts(model)
    found = {**granite(model, config), "num_local_experts": count, "num_experts_per_tok": used}
    found.pop("mlp_bias")
    return found


def _scoring(model: GGUFModel, default: int) -> str:
    """Return how routers score experts."""
    named = {1: "softmax", 2: "sigmoid"}
    value = model.keys.integer("expert_gating_func", default)
    if value not in named:
        raise unsupported(f"{model.keys.full('expert_gating_func')} is {value}, which aiakq does not compute")
    return named[value]


def _groups(model: GGUFModel) -> dict[str, int]:
    """Return into how many groups experts are divided, and how many of these are used for a token."""
    keys = model.keys
    return {"n_group": keys.integer("expert_group_count", 1), "topk_group": keys.integer("expert_group_used_count", 1)}


def glm4_moe(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """GLM 4.5 and later, without its additional layers that predict more tokens."""
    keys = model.keys
    keys.fixed("rope.dimension_sections", [0, 0, 0, 0])
    if _scoring(model, 2) != "sigmoid":
        raise unsupported("a GLM 4 whose router uses softmax")
    count, used = _experts(model)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "use_qk_norm": model.has("blk.0.attn_q_norm.weight"),
        "attention_bias": model.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        **_groups(model),
    }


def deepseek2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """DeepSeek V2 and V3, whose routers differ: with a correction or sigmoids it is V3."""
    keys = model.keys
    dim, rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    width = keys.integer("attention.key_length_mla", None) or keys.integer("attention.key_length")
    value = keys.integer("attention.value_length_mla", None) or keys.integer("attention.value_length")
    count, used = _experts(model)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.shapes)
    newer = _scoring(model, 2 if corrected else 1) == "sigmoid"
    if corrected and not newer:
        raise unsupported("a DeepSeek whose router corrects the choice of experts, and uses softmax")
    found = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": dim,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank", None, low=0) or None,
        "qk_rope_head_dim": dim,
        "qk_nope_head_dim": width - dim,
        "v_head_dim": value,
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "attention_bias": model.has("blk.0.attn_kv_a_mqa.bias"),
        **_groups(model),
    }
    if newer:
        return {**found, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**found, "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def latent_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return kv_b_proj [H * (N + V), R] from the matrices that absorb it: keys [H, R, N], transposed, and values
    [H, V, R].
    """
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def latent_parts(value: Tensor, config: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return keys [H, R, N] and values [H, V, R] of kv_b_proj [H * (N + V), R], the inverse of ``latent_rows``."""
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]
    each = value.reshape(heads, -1, value.shape[1])
    return [each[:, :width].transpose(1, 2), each[:, width:]]


def gpt_oss(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """GPT-OSS."""
    count, used = _experts(model)
    scaling = config.get("rope_scaling")
    found: dict[str, Any] = {
        "intermediate_size": model.keys.integer("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "attention_bias": model.has("blk.0.attn_q.bias"),
        "swiglu_limit": 7.0,
        **per_layer_windows(model, config, 2),
    }
    if isinstance(scaling, dict) and scaling["rope_type"] == "yarn":
        found["rope_scaling"] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | scaling
    return found


def interleaved_columns(parts: Sequence[Tensor]) -> Tensor:
    """Return gate and up [E, F, K] as [E, K, 2F], with their outputs interleaved; biases [E, F] as [E, 2F]."""
    both = torch.stack(list(parts), dim=2).flatten(1, 2)
    return both.transpose(1, 2).contiguous() if both.dim() == 3 else both


def alternate_columns(value: Tensor, config: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return gate and up of both, the inverse of ``interleaved_columns``."""
    rows = value.transpose(1, 2) if value.dim() == 3 else value
    return [rows[:, 0::2], rows[:, 1::2]]


def columns(parts: Sequence[Tensor]) -> Tensor:
    """Return gate and up [E, F, K] as [E, K, 2F]."""
    return side_by_side(parts).transpose(1, 2).contiguous()


def column_halves(value: Tensor, config: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return gate and up [E, F, K] of [E, K, 2F], the inverse of ``columns``."""
    return value.transpose(1, 2).chunk(2, dim=1)


def transposed(parts: Sequence[Tensor]) -> Tensor:
    """Return [E, N, K] as [E, K, N]; biases [E, N] as they are."""
    return parts[0].transpose(1, 2).contiguous() if parts[0].dim() == 3 else parts[0]


def transposed_back(value: Tensor, config: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the part of ``transposed``."""
    return [value.transpose(1, 2) if value.dim() == 3 else value]


def llama4(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Llama 4, the text model. Raises ``gguf_unsupported`` for models without experts."""
    keys = model.keys
    keys.fixed("attention.sliding_window", 8192)
    keys.fixed("attention.chunk_size", 8192)
    count, used = _experts(model)
    step = keys.integer("interleave_moe_layer_step")
    rotated = [(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])]
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192.0,
        "attn_scale": 0.1,
        "use_qk_norm": count != 128,
        "no_rope_layers": [int(each) for each in rotated],
        "layer_types": ["chunked_attention" if each else "full_attention" for each in rotated],
        "attention_bias": attention_biases(model, config)["attention_bias"],
    }


SPARSE: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", {**_MIXTRAL, **LLAMA_PERMUTED}, OUTER, llama_or_mixtral),
    "qwen2moe": GGUFFamily(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **NORMS,
            **PROJECTIONS,
            **EXPERTS,
            "ffn_gate_inp_shexp": Reshaped("mlp.shared_expert_gate", lambda stored: (1, stored.shape[-1]), tuple),
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        OUTER,
        qwen2_moe,
    ),
    "qwen3moe": GGUFFamily(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**NORMS, **PROJECTIONS, **HEAD_NORMS, **EXPERTS}, OUTER, qwen3_moe
    ),
    "olmoe": GGUFFamily("OlmoeForCausalLM", "olmoe", {**NORMS, **PROJECTIONS, **HEAD_NORMS, **EXPERTS}, OUTER, olmoe),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", LLAMA_PERMUTED, OUTER, granite),
    "granitemoe": GGUFFamily(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {
            **NORMS,
            **PERMUTED,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": Combined("block_sparse_moe.input_linear", "ffn_up_exps", side_by_side, halves),
            "ffn_up_exps": Unread(),
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_gate_up_exps": "block_sparse_moe.input_linear",
        },
        OUTER,
        granite_moe,
    ),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            "post_attention_norm": "post_attention_layernorm",
            **NORMS,  # whose ffn_norm older files have instead
            **PROJECTIONS,
            **MLP,
            **HEAD_NORMS,
            **EXPERTS,
            **_SHARED,
        },
        OUTER,
        glm4_moe,
    ),
    "deepseek2": GGUFFamily(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **NORMS,
            **MLP,
            **EXPERTS,
            **_SHARED,
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_k_b": Combined("self_attn.kv_b_proj", "attn_v_b", latent_rows, latent_parts),
            "attn_kv_b": "self_attn.kv_b_proj",  # of files of 2024
            "attn_v_b": Unread(),
            "attn_output": "self_attn.o_proj",
        },
        OUTER,
        deepseek2,
        latent=True,
    ),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **PROJECTIONS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": Bare("self_attn.sinks"),
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": Combined(
                "mlp.experts.gate_up_proj",
                "ffn_up_exps",
                interleaved_columns,
                alternate_columns,
                bias=True,
                experts=True,
            ),
            "ffn_up_exps": Unread(),
            "ffn_down_exps": Combined(
                "mlp.experts.down_proj", "", transposed, transposed_back, bias=True, experts=True
            ),
        },
        OUTER,
        gpt_oss,
    ),
    "llama4": GGUFFamily(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            **NORMS,
            **PROJECTIONS,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps": StackedExperts(_LLAMA4_PARTS[0]),
            "ffn_up_exps": StackedExperts(_LLAMA4_PARTS[1]),
            "ffn_down_exps": StackedExperts(_LLAMA4_PARTS[2]),
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        OUTER,
        llama4,
    ),
}
