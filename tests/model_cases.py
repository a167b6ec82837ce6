"""Configs of tiny random models of most model types of transformers, for tests/runtime/models/test_matrix.py."""

from __future__ import annotations

from typing import Any

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 32}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
#: Shorter than most prompts, with enough heads that no two scores are equal.
INDEX = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 16}
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_ctx": 512, "intermediate_size": 512}
FALCON = {"num_kv_heads": 2, "intermediate_size": 512}
BLOOM = {"n_head": 4, "n_layer": 2, "intermediate_size": 512}
SSM = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_expand": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 24}
#: Four layers with windows in half of them, and other frequencies there.
WINDOWS = {
    **FOUR, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
FREQUENCIES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    }
}
PROPORTIONAL = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    }
}
GEMMA4 = {
    **HEADS, **WINDOWS, **PROPORTIONAL, "final_logit_softcapping": 5.0,
    "per_layer_config": {"01": {"head_dim": 64}, "03": {"head_dim": 64}},
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
GEMMA3N = {
    **HEADS, **WINDOWS, **PER_LAYER, "intermediate_size": [256, 256, 192, 192], "laurel_rank": 32,
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    "layer_rope_theta": [300.0, 5000.0, 300.0, 0.0],
}  # fmt: skip
MINIMAX = {
    **HEADS, **EXPERTS, "intermediate_size": 64, "dense_intermediate_size": 256, "shared_intermediate_size": 64,
    "rotary_dim": 16, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
INDEXED = {
    **EXPERTS, **LATENT, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse"], "layer_types": ["indexed_attention", "indexed_attention"],
}  # fmt: skip
HYBRID = {
    **HEADS, **EXPERTS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
    "sliding_window_size": 8, "rel_extent": 32, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
#: The decoders of models that also have an encoder.
SEQ2SEQ = {
    "d_model": 128, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 256, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_start_token_id": 0,
}  # fmt: skip
DECODER = {"is_decoder": True}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """Rotary scaling beyond a context of 64."""
    return {
        "rope_parameters": {
            "rope_type": kind, "rope_theta": 500.0, "original_max_position_embeddings": 64, **values
        }
    }  # fmt: skip


#: Name of a case -> model type and what its config has besides SIZES, or instead of them; ... leaves a key out.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, config)
    for name, config in {
        "afmoe": {**HEADS, **EXPERTS, **FOUR}, "apertus": HEADS, "arcee": HEADS,
        "aria_text": {**EXPERTS, "moe_num_experts": 4}, "axk1": {**EXPERTS, **LATENT},
        "bailing_hybrid": {**EXPERTS, **HEADS}, "bamba": {**SSM, "attn_layer_indices": [1]}, "biogpt": {},
        "bitnet": {}, "bloom": BLOOM, "codegen": {**GPT2, "rotary_dim": 16}, "cohere": {}, "cohere2": WINDOW,
        "cohere2_moe": {**EXPERTS, **WINDOW}, "ctrl": {"dff": 256, **GPT2}, "cwm": {**HEADS, **WINDOW},
        "deepseek_v2": {**EXPERTS, **LATENT}, "deepseek_v3": {**EXPERTS, **LATENT},
        "deepseek_v32": {**EXPERTS, **LATENT, **INDEX}, "diffllama": {}, "doge": {},
        "ernie4_5": HEADS,
        "ernie4_5_moe": {
            **HEADS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "exaone4": {**HEADS, **WINDOW, **FOUR}, "exaone_moe": {**HEADS, **EXPERTS, **WINDOW, **FOUR},
        "falcon": FALCON, "falcon_h1": {**SSM, **HEADS, "mamba_d_ssm": 256}, "falcon_mamba": {},
        "flex_olmo": EXPERTS, "gemma": HEADS, "gemma2": {**HEADS, **WINDOW},
        "gemma3_text": {**HEADS, **WINDOW, **FOUR}, "glm": HEADS, "glm4": HEADS, "glm4_moe": {**HEADS, **EXPERTS},
        "glm4_moe_lite": {**EXPERTS, **LATENT},
        "glm_moe_dsa": {**EXPERTS, **LATENT, **INDEX},
        "gpt-sw3": GPT2, "gpt2": GPT2, "gpt_bigcode": GPT2,
        "gpt_neo": {
            "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 24,
        },
        "gpt_neox": {}, "gpt_neox_japanese": {}, "gpt_oss": {**HEADS, **EXPERTS, **WINDOW},
        "gptj": {**GPT2, "rotary_dim": 16},
        "granite": {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        "granitemoe": EXPERTS,
        "granitemoehybrid": {
            **EXPERTS, **SSM, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64,
        },
        "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 64}, "helium": HEADS, "hunyuan_v1_dense": HEADS,
        "hunyuan_v1_moe": {
            **HEADS, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 64, "num_shared_expert": 1,
        },
        "hy_v3": {**HEADS, **EXPERTS}, "hyperclovax": {}, "internlm3": {}, "iquestcoder": {}, "jais2": HEADS,
        "jamba": {
            **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "use_mamba_kernels": False,
        },
        "jetmoe": {**EXPERTS, "kv_channels": 32},
        "kimi_linear": {
            **EXPERTS, **LATENT, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 8,
            "linear_head_dim": 32,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "llama": {},
        "llama4_text": {
            **HEADS, **EXPERTS, **FOUR, "attention_chunk_size": 24, "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
        },
        "longcat_flash": {
            **EXPERTS, **LATENT, "ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "zero_expert_num": 1,
            "moe_topk": 2, "num_layers": 2,
        },
        "mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
        "mellum": {**HEADS, **EXPERTS}, "mimo": HEADS, "minicpm3": LATENT,
        "minimax": {**HEADS, **EXPERTS, "block_size": 16},
        "minimax_m2": {**HEADS, **EXPERTS, "rotary_dim": 16}, "ministral": {**HEADS, **WINDOW}, "ministral3": HEADS,
        "mistral": WINDOW, "mixtral": EXPERTS, "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2}, "nanochat": {},
        "nemotron": {},
        "nemotron_h": {
            **HEADS, **EXPERTS, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
            "chunk_size": 16, "hybrid_override_pattern": "M*-E", "moe_shared_expert_intermediate_size": 64,
            **FOUR,
        },
        "olmo": {}, "olmo2": {}, "olmo3": {**WINDOW, **FOUR}, "olmo_hybrid": {**LINEAR}, "olmoe": EXPERTS,
        "openai-gpt": GPT2, "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128}, "persimmon": {}, "phi": {},
        "phi3": {}, "phimoe": EXPERTS, "qwen2": {}, "qwen2_moe": EXPERTS, "qwen3": HEADS,
        "qwen3_5_text": {**HEADS, **LINEAR, "linear_num_value_heads": 8},
        "qwen3_5_moe_text": {**HEADS, **EXPERTS, **LINEAR, "linear_num_value_heads": 8},
        "qwen3_moe": {**HEADS, **EXPERTS},
        "qwen3_next": {**HEADS, **EXPERTS, **LINEAR},
        "recurrent_gemma": {"lru_width": 128, "attention_window_size": 24, **HEADS, "num_hidden_layers": 3},
        "rwkv": {}, "seed_oss": HEADS, "smollm3": FOUR,
        "solar_open": {**HEADS, **EXPERTS, "first_k_dense_replace": 0}, "stablelm": {},
        "starcoder2": {}, "vaultgemma": {**HEADS, **WINDOW},
        "xglm": {"d_model": 128, "attention_heads": 4, "num_layers": 2, "ffn_dim": 256}, "xlstm": {}, "youtu": LATENT,
        "dots1": {**HEADS, **EXPERTS},
        "gemma4_text": {**GEMMA4, **PER_LAYER}, "gemma4_unified_text": GEMMA4, "gemma3n_text": GEMMA3N,
        "lfm3": {
            **HEADS, **WINDOWS, **PROPORTIONAL,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
        "granite_swa": {**WINDOWS, **MULTIPLIERS},
        "granitemoe_swa": {**EXPERTS, **WINDOWS, **MULTIPLIERS, "shared_intermediate_size": 64},
        "mimo_v2_flash": {**HEADS, **EXPERTS, **WINDOWS, **FREQUENCIES, **SPARSE, "v_head_dim": 24},
        "minimax_m3_vl_text": MINIMAX,
        "laguna": {
            **HEADS, **EXPERTS, **WINDOWS, **FREQUENCIES, **SPARSE, "num_attention_heads_per_layer": [2, 4, 4, 2],
        },
        "hy_v4": {**INDEXED, **INDEX, "indexer_types": ["full", "shared"]},
        "qwen4_exp_text": {
            **HEADS, **EXPERTS, **LINEAR, "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
        "zamba": {
            "num_hidden_layers": 6, "mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 3,
            "attn_layer_offset": 2, "use_mamba_kernels": False,
        },
        "zamba2": {
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3,
            "mamba_d_state": 16, "n_mamba_heads": 8, "adapter_rank": 16, "num_key_value_heads": 4,
        },
        "dbrx": {
            "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            **dict.fromkeys(SIZES.keys() - {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}, ...),
        },
        "modernbert-decoder": {**WINDOWS, "local_attention": 16}, "axk2": {**INDEXED, **INDEX},
        "cohere_compass_text": {**HEADS, **WINDOWS, **FREQUENCIES, "logit_scale": 0.25},
        "cpmant": {"dim_head": 32, "dim_ff": 256},
        "deepseek_v4": {
            **EXPERTS, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
            "o_groups": 2, "o_lora_rank": 16, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2,
            "sliding_window": 8, "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["hash_moe", "moe"],
        },
        "dots3_note_text": {**INDEXED, "layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 8},
        "flint": {**HEADS, **EXPERTS, **WINDOWS, "mlp_only_layers": [0]},
        "hrm_text": {**HEADS, "num_layers_per_stack": 2, "L_cycles": 2, "H_cycles": 2, "num_hidden_layers": 12},
        "inkling_text": {**HYBRID, "mlp_layer_types": ["dense", "sparse"]},
        "inkling2_text": {**HYBRID, "unpadded_vocab_size": VOCABULARY},
        "kolibri1": {**HEADS, **EXPERTS, **WINDOWS}, "beam": {**HEADS, **EXPERTS, **WINDOWS, **SPARSE},
        "zaya": {**HEADS, **EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 32},
        "moshi": {**HEADS, "ffn_dim": 256}, "git": {}, "xlm": {"emb_dim": 128, "n_layers": 2, "n_heads": 4},
        "xlnet": {
            "d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 256, "d_head": 32, "max_position_embeddings": ...,
        },
        "reformer": {
            "attention_head_size": 32, "feed_forward_size": 256, "axial_pos_shape": [16, 32], "num_buckets": 4,
            "axial_pos_embds_dim": [64, 64], "attn_layers": ["local", "lsh"], **DECODER,
        },
        "bert": DECODER, "bert-generation": DECODER, "big_bird": DECODER, "electra": {**DECODER, "embedding_size": 128},
        "ernie": DECODER, "megatron-bert": DECODER, "rembert": DECODER, "roberta": DECODER, "roc_bert": DECODER,
        "roformer": DECODER, "bart": SEQ2SEQ, "pegasus": SEQ2SEQ, "trocr": SEQ2SEQ, "whisper": SEQ2SEQ,
    }.items()
} | {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, every head its key": ("llama", {"num_key_value_heads": 4}),
    "llama, one key": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 48}),
    "llama, linear scaling": ("llama", rope("linear", factor=4.0)),
    "llama, dynamic scaling": ("llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 256}),
    "llama, llama3 scaling": ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": ("llama", rope("yarn", factor=4.0)),
    "llama, yarn with mscale": ("llama", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.0)),
    "llama, yarn without truncation": ("llama", rope("yarn", factor=4.0, truncate=False)),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 256,
            **rope(
                "longrope",
                short_factor=[1.0 + index / 16 for index in range(16)],
                long_factor=[2.0 + index for index in range(16)],
            ),
        },
    ),
    "phi3, window": ("phi3", WINDOW),
    "qwen2, windows in half the layers": (
        "qwen2", {**WINDOW, **FOUR, "use_sliding_window": True, "max_window_layers": 2}
    ),
    "qwen2_moe, a dense layer": ("qwen2_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "gemma2, no caps": ("gemma2", {**HEADS, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gpt2, scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode, every head its key": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "falcon, new architecture": ("falcon", {**FALCON, "new_decoder_architecture": True, "bias": True}),
    "falcon, in sequence": ("falcon", {**FALCON, "num_kv_heads": 4, "multi_query": False, "parallel_attn": False}),
    "falcon, ALiBi": ("falcon", {**FALCON, "alibi": True}),
    "hunyuan_v1_dense, a stretched base": ("hunyuan_v1_dense", {**HEADS, **rope("dynamic", factor=1.0, alpha=50.0)}),
    "zamba2, two blocks with adapters and positions": (
        "zamba2",
        {
            "layers_block_type": ["hybrid", "hybrid", "hybrid"], "num_hidden_layers": 3, "num_key_value_heads": 4,
            "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "adapter_rank": 16, "num_mem_blocks": 2,
            "use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True,
            "time_step_min": 0.9,
        },
    ),
    "stablelm, norms of heads": ("stablelm", {"qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "deepseek_v2, no query latent": ("deepseek_v2", {**EXPERTS, **LATENT, "q_lora_rank": None}),
    "glm_moe_dsa, a shared index": (
        "glm_moe_dsa", {**EXPERTS, **LATENT, **INDEX, "indexer_types": ["full", "shared"]},
    ),
    "deepseek_v3, groups of experts": (
        "deepseek_v3",
        {**EXPERTS, **LATENT, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "falcon_h1, multipliers": (
        "falcon_h1",
        {
            **SSM, **HEADS, "mamba_d_ssm": 192, "mamba_d_head": 24, "mamba_n_groups": 2, "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.8, 1.2, 0.7, 1.4, 0.6], "key_multiplier": 0.8, "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "projectors_bias": True, "attention_bias": True,
            "mlp_bias": True, "mamba_proj_bias": True,
        },
    ),
    "falcon_h1, gated norms": (
        "falcon_h1", {**SSM, **HEADS, "mamba_d_ssm": 256, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "nemotron_h, biases": (
        "nemotron_h",
        {
            **HEADS, **FOUR, "mamba_num_heads": 8, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2,
            "chunk_size": 16, "layers_block_type": ["mlp", "full_attention", "linear_attention", "mlp"],
            "use_bias": True, "mlp_bias": True, "time_step_min": 1.2,
        },
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {
            **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
            "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
            "per_layer_config": {each: {"head_dim": 64, "num_key_value_heads": 1} for each in ("01", "03")},
        },
    ),
    "gemma4_text, shared keys": ("gemma4_text", {**GEMMA4, **PER_LAYER, "num_kv_shared_layers": 2}),
    "gemma4_text, attention in both directions": (
        "gemma4_text", {**GEMMA4, **PER_LAYER, "use_bidirectional_attention": "all"}
    ),
    "gemma3n_text, no shared keys": ("gemma3n_text", {**GEMMA3N, "num_kv_shared_layers": 0}),
    "minimax_m3_vl_text, sparse": (
        "minimax_m3_vl_text",
        {
            **MINIMAX, "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
            "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 2,
        },
    ),
    "bert, not a decoder": ("bert", {}),
    "granitemoehybrid, no attention": (
        "granitemoehybrid", {**EXPERTS, **SSM, "layer_types": ["mamba", "mamba"], "shared_intermediate_size": 64}
    ),
}  # fmt: skip
