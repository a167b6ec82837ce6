"""Every native family against transformers: log-probabilities of every position, in batches and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from family_comparison import TOLERANCE, TOLERANCES, largest_difference, of_transformers, ours, rewritten

from aiakq.runtime.models import ARCHITECTURES

MODES: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True},
    "operation by operation": {"max_num_seqs": 1, "enforce_eager": True},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_transformers(architecture, tiny_model):
    folder = tiny_model(architecture)
    expected = of_transformers(folder)
    differences = {mode: largest_difference(ours(folder, **arguments), expected) for mode, arguments in MODES.items()}
    assert max(differences.values()) < TOLERANCES.get(architecture, TOLERANCE), differences


#: Other spellings and settings of a family: architecture, what its tiny config has besides, what config.json says.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt_bigcode without shared keys": ("GPTBigCodeForCausalLM", {"multi_query": False}, {}),
    "gpt2 scaled by layer": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, {}),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + index / 16 for index in range(16)],
                "long_factor": [2.0 + index for index in range(16)],
            },
        },
        {},
    ),
    "phi3 longrope, short and long texts": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + index / 16 for index in range(16)],
                "long_factor": [2.0 + index for index in range(16)],
            },
        },
        {},
    ),
    "yarn beyond its original context": (
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 32,
            },
        },
        {},
    ),
    "dynamic within what it was trained for": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 32,
            }
        },
        {},
    ),
    "top-level partial_rotary_factor": (
        "PhiForCausalLM",
        {},
        {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmo3 with old rope_scaling": (
        "Olmo3ForCausalLM",
        {},
        {
            "rope_parameters": None,
            "rope_theta": 300.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "falcon with groups": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {},
    ),
    "falcon with groups and one norm": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {},
    ),
    "falcon in sequence with keys for every head": (
        "FalconForCausalLM",
        {"multi_query": False, "parallel_attn": False},
        {},
    ),
    "falcon with ALiBi": ("FalconForCausalLM", {"alibi": True, "bias": True}, {}),
    "falcon with ALiBi, in sequence with keys for every head": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {},
    ),
    "falcon with ALiBi and groups": (
        "FalconForCausalLM",
        {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
        {},
    ),
    "gemma3 in the old spelling": (
        "Gemma3ForCausalLM",
        {},
        {
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "gemma2 without caps": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {},
    ),
    "gptj that rotates whole heads": ("GPTJForCausalLM", {"rotary_dim": 32}, {}),
    "llama4 with experts in every layer": (
        "Llama4ForCausalLM",
        {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "use_qk_norm": False},
        {},
    ),
    "smollm3 that names its layers": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 0, 1]}, {}),
    "deepseek v2 lite, with biases": (
        "DeepseekV2ForCausalLM",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": None,
        },
        {},
    ),
    "deepseek v3 with halves rotated and yarn": (
        "DeepseekV3ForCausalLM",
        {
            "rope_interleave": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {},
    ),
    "deepseek v3.2 with biases, yarn and a list of dense layers": (
        "DeepseekV32ForCausalLM",
        {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
        {},
    ),
    "glm 5 with a schedule of indices": (
        "GlmMoeDsaForCausalLM",
        {"num_hidden_layers": 4, "indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"indexer_types": None, "mlp_layer_types": None},
    ),
    "lfm2 in the old spelling, with biases": (
        "Lfm2ForCausalLM",
        {"conv_bias": True, "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3},
        {"layer_types": None, "full_attn_idxs": [1], "intermediate_size": None, "block_ff_dim": 384},
    ),
    "lfm3 with layers that follow from their number": (
        "Lfm3ForCausalLM",
        {
            "layer_types": None,
            "num_hidden_layers": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            },
        },
        {"layer_types": None},
    ),
    "lfm3 with biases, without gates and outer norms": (
        "Lfm3ForCausalLM",
        {
            **dict.fromkeys(("attention_bias", "conv_bias"), True),
            **dict.fromkeys(("use_attention_gate", "use_sandwich_norm", "tie_word_embeddings"), False),
            "conv_L_cache": 3,
        },
        {},
    ),
    "gemma 4 with experts beside the MLP, and without inputs of layers": (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
        },
        {},
    ),
    "gemma 4 as files from the hub spell it": (
        "Gemma4ForCausalLM",
        {
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
            "attention_k_eq_v": False,
            "per_layer_config": {5: {"head_dim": 64}},
            "final_logit_softcapping": None,
        },
        {"layer_types": None, "per_layer_config": None, "global_head_dim": 64, "num_global_key_value_heads": 1},
    ),
    "gemma 3n as files from the hub spell it": (
        "Gemma3nForCausalLM",
        {
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "num_kv_shared_layers": 1,
            "intermediate_size": 256,
            "activation_sparsity_pattern": None,
            "altup_active_idx": 0,
            "altup_correct_scale": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {
            **{"rope_parameters": None, "rope_theta": 5000.0, "rope_local_base_freq": 300.0, "layer_types": None},
            **{"intermediate_size": 256, "altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256},
        },
    ),
    "lfm2 with the width it states": ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False}, {}),
    "mamba2 with biases and limits": (
        "Mamba2ForCausalLM",
        {"use_bias": True, "use_conv_bias": False, "time_step_limit": [0.05, 0.4], "tie_word_embeddings": True},
        {},
    ),
    "mamba with another width": (
        "MambaForCausalLM",
        {"expand": 3, "use_bias": False, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 8},
        {"intermediate_size": None, "time_step_rank": "auto", "rms_norm": True, "d_inner": 384, "ssm_cfg": {}},
    ),
    "qwen3_next with biases and a pattern": (
        "Qwen3NextForCausalLM",
        {
            "attention_bias": True,
            "norm_topk_prob": False,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
        },
        {"layer_types": None, "full_attention_interval": 2},
    ),
    "olmo hybrid with positions and sizes that follow from others": (
        "OlmoHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")),
            **dict.fromkeys(("linear_value_head_dim", "layer_types", "rope_parameters")),
        },
        {},
    ),
    "kimi linear in its authors' spelling, with low-rank queries and biases": (
        "KimiLinearForCausalLM",
        {"q_lora_rank": 64, "attention_bias": True, "linear_conv_kernel_dim": 3, "num_expert_group": 2},
        {
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 32,
                "short_conv_kernel_size": 3,
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
            },
            **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads")),
            **{"linear_conv_kernel_dim": None, "first_k_dense_replace": 1, "mla_use_nope": True, "rope_theta": 1e4},
        },
    ),
    "minimax with another epsilon, which the norm of lightning attention has not": (
        "MiniMaxForCausalLM",
        {"rms_norm_eps": 0.05},
        {},
    ),
    "granite 4 without experts, with positions": (
        "GraniteMoeHybridForCausalLM",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
        {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "hunyuan with biases, and without a stretched base": (
        "HunYuanDenseV1ForCausalLM",
        {"attention_bias": True, "rope_parameters": None},
        {},
    ),
    "hunyuan with lists by layer": ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 3]}, {"num_shared_expert": [1, 1]}),
    "mpt with scores of zero": ("MptForCausalLM", {"attn_config": {"softmax_scale": 0.0}}, {}),
    "granite with multipliers of zero": (
        "GraniteForCausalLM",
        {"residual_multiplier": 0.0, "attention_multiplier": 0.0},
        {},
    ),
    "cohere with norms of heads": ("CohereForCausalLM", {"use_qk_norm": True}, {}),
    "stablelm with norms of heads": ("StableLmForCausalLM", {"qk_layernorm": True}, {}),
    "exaone4 without windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_families(name, tiny_model, tmp_path):
    architecture, settings, written = VARIANTS[name]
    folder = tiny_model(architecture, **settings)
    expected = of_transformers(folder)
    if written:
        folder = rewritten(folder, tmp_path / "model", written)
    assert largest_difference(ours(folder), expected) < TOLERANCES.get(architecture, TOLERANCE)
