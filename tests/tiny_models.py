"""Configs of tiny random models, one of each native family and some others."""

from __future__ import annotations

from typing import Any

from tiny_further_models import FURTHER
from tiny_gemma_models import GEMMA4

#: What makes each tiny model unlike the others; sizes that divide by 32 and 128 so that every format can hold them.
_COMMON = {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA_LIKE = {
    **_COMMON,
    "intermediate_size": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_QUARTER = {"partial_rotary_factor": 0.25}
_PAD = {"pad_token_id": 2}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
#: DeepSeek's: heads of 48 + 16 elements over latents of 32, and 8 experts.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
#: Enough index heads that no two scores are equal: transformers breaks ties in no stated order.
_INDEXED = {**_LLAMA_LIKE, **_LATENT, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_DELTA_RULE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
_GPT2 = {
    "vocab_size": 320,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Families whose norms stay those of a fresh model: numbers in other tests hang on them.
PLAIN_NORMS = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "OPT", "Arcee", "GPTNeoX")
)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {**_LLAMA_LIKE, "tie_word_embeddings": False}),
    "MistralForCausalLM": ("mistral", {**_LLAMA_LIKE, "sliding_window": 24, "head_dim": 32}),
    "Qwen2ForCausalLM": ("qwen2", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("qwen3", {**_LLAMA_LIKE, "head_dim": 48, "tie_word_embeddings": True}),
    "OPTForCausalLM": (
        "opt",
        {
            **_COMMON, "ffn_dim": 256, "max_position_embeddings": 512, "word_embed_proj_dim": 128, "bos_token_id": 0,
            "eos_token_id": 1, "pad_token_id": 2,
        },
    ),
    "MixtralForCausalLM": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {
            **_LLAMA_LIKE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {
            **_LLAMA_LIKE,
            "head_dim": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "GemmaForCausalLM": ("gemma", {**_LLAMA_LIKE, "head_dim": 48}),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 4,
            "head_dim": 48,
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
            **_PAD,
        },
    ),
    "Gemma2ForCausalLM": (
        "gemma2",
        {
            **_LLAMA_LIKE,
            **_PAD,
            "num_hidden_layers": 4,
            "head_dim": 48,
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 5.0,
        },
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        {
            **_LLAMA_LIKE,
            **_PAD,
            "head_dim": 48,
            "intermediate_size": 128,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "truncate": False,
            },
        },
    ),
    "Llama4ForCausalLM": (
        "llama4_text",
        {
            **_LLAMA_LIKE,
            **_PAD,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 128,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "floor_scale": 16,
        },
    ),
    "GlmForCausalLM": ("glm", {**_LLAMA_LIKE, **_PAD, "head_dim": 48, "attention_bias": True}),
    "Glm4ForCausalLM": ("glm4", {**_LLAMA_LIKE, **_PAD, "head_dim": 48, "attention_bias": True}),
    "CohereForCausalLM": ("cohere", {**_LLAMA_LIKE, **_PAD, "logit_scale": 0.25}),
    "Cohere2ForCausalLM": (
        "cohere2",
        {**_LLAMA_LIKE, **_PAD, "num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.25},
    ),
    "GPTJForCausalLM": ("gptj", {**_GPT2, "rotary_dim": 16}),
    "BloomForCausalLM": (
        "bloom",
        {"vocab_size": 320, "hidden_size": 192, "n_layer": 2, "n_head": 6, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "MptForCausalLM": (
        "mpt",
        {"vocab_size": 320, "d_model": 192, "n_layers": 2, "n_heads": 6, "max_seq_len": 512, "eos_token_id": 1},
    ),
    "FalconForCausalLM": ("falcon", {**_COMMON, **_PAD, "bos_token_id": 0, "eos_token_id": 1}),
    "Phi3ForCausalLM": ("phi3", {**_LLAMA_LIKE, "rope_parameters": _PARTIAL, "sliding_window": 40, **_PAD}),
    "PhiForCausalLM": ("phi", {**_LLAMA_LIKE, "rope_parameters": _PARTIAL}),
    "PhimoeForCausalLM": (
        "phimoe",
        {
            **_LLAMA_LIKE,
            **_PAD,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "Olmo2ForCausalLM": ("olmo2", {**_LLAMA_LIKE}),
    "Olmo3ForCausalLM": (
        "olmo3",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 300.0,
                },
            },
        },
    ),
    "OlmoHybridForCausalLM": (
        "olmo_hybrid",
        {**_LLAMA_LIKE, **_PAD, **_DELTA_RULE, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "OlmoeForCausalLM": (
        "olmoe",
        {**_LLAMA_LIKE, "intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "Exaone4ForCausalLM": (
        "exaone4",
        {**_LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 4},
    ),
    "GraniteForCausalLM": ("granite", {**_LLAMA_LIKE, **_GRANITE}),
    "GraniteMoeForCausalLM": (
        "granitemoe",
        {**_LLAMA_LIKE, **_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "SmolLM3ForCausalLM": ("smollm3", {**_LLAMA_LIKE, "num_hidden_layers": 4, **_PAD}),
    "Starcoder2ForCausalLM": ("starcoder2", {**_LLAMA_LIKE, "sliding_window": 40}),
    "GPT2LMHeadModel": ("gpt2", _GPT2),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", _GPT2),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            **_LLAMA_LIKE,
            "head_dim": 48,
            "num_hidden_layers": 3,
            "rope_parameters": _PARTIAL,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    "DeepseekV2ForCausalLM": (
        "deepseek_v2",
        {
            **_LLAMA_LIKE,
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.5,
            },
        },
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {**_LLAMA_LIKE, **_LATENT, "n_group": 4, "topk_group": 2, "attention_bias": True},
    ),
    "Lfm2ForCausalLM": (
        "lfm2",
        {
            **_LLAMA_LIKE, "num_hidden_layers": 4, "intermediate_size": 384, "block_multiple_of": 128,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    "MambaForCausalLM": (
        "mamba",
        {
            **{key: each for key, each in _COMMON.items() if key != "num_attention_heads"}, **_PAD, "state_size": 12,
            "time_step_rank": 10, "use_bias": True, "bos_token_id": 0, "eos_token_id": 1,
        },
    ),
    "FalconMambaForCausalLM": (
        "falcon_mamba",
        {
            **{key: each for key, each in _COMMON.items() if key != "num_attention_heads"}, **_PAD, "state_size": 16,
            "intermediate_size": 224, "mixer_rms_eps": 1e-3, "bos_token_id": 0, "eos_token_id": 1,
        },
    ),
    "Mamba2ForCausalLM": (
        "mamba2",
        {
            **_COMMON, **_PAD, "num_heads": 8, "head_dim": 32, "state_size": 24, "n_groups": 2, "chunk_size": 16,
            "bos_token_id": 0, "eos_token_id": 1,
        },
    ),
    "JambaForCausalLM": (
        "jamba",
        {
            **_LLAMA_LIKE, **_PAD, "num_hidden_layers": 4, "mamba_d_state": 12, "attn_layer_period": 3,
            "attn_layer_offset": 2, "num_experts": 6, "num_experts_per_tok": 2, "mamba_proj_bias": True,
        },
    ),
    "BambaForCausalLM": ("bamba", {**_LLAMA_LIKE, **_PAD, **_MAMBA, "attn_layer_indices": [1]}),
    "FalconH1ForCausalLM": (
        "falcon_h1",
        {
            **_LLAMA_LIKE, **_PAD, **_MAMBA, "head_dim": 48, "mamba_d_ssm": 256, "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.8, 1.2, 0.7, 1.4, 0.6], "key_multiplier": 0.8, "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7,
        },
    ),
    "NemotronHForCausalLM": (
        "nemotron_h",
        {
            **{key: each for key, each in {**_LLAMA_LIKE, **_PAD}.items() if key != "num_hidden_layers"},
            "head_dim": 48, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 24, "n_groups": 2,
            "chunk_size": 16, "layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 128, "routed_scaling_factor": 1.5,
        },
    ),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        {
            **_LLAMA_LIKE, **_PAD, **_GRANITE, **_MAMBA, "num_hidden_layers": 3, "shared_intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6, "num_experts_per_tok": 2,
        },
    ),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        {
            **_LLAMA_LIKE, **_DELTA_RULE, "head_dim": 48, "rope_parameters": {**_PARTIAL, **_QUARTER},
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256, "mlp_only_layers": [2],
        },
    ),
    "Qwen3_5ForCausalLM": (
        "qwen3_5_text",
        {**_LLAMA_LIKE, **_DELTA_RULE, "head_dim": 48, "rope_parameters": {**_PARTIAL, **_QUARTER}},
    ),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5_moe_text",
        {
            **_LLAMA_LIKE, **_DELTA_RULE, "head_dim": 48, "rope_parameters": {**_PARTIAL, **_QUARTER},
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "Lfm3ForCausalLM": (
        "lfm3",
        {
            **_LLAMA_LIKE, "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 24, **_PAD,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention", "conv"],
        },
    ),
    "Lfm2MoeForCausalLM": (
        "lfm2_moe",
        {
            **_LLAMA_LIKE, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        },
    ),
    "StableLmForCausalLM": (
        "stablelm",
        {
            **_LLAMA_LIKE, "rope_parameters": {**_PARTIAL, **_QUARTER}, "use_qkv_bias": True,
            "use_parallel_residual": True,
        },
    ),
    "CodeGenForCausalLM": ("codegen", {**_GPT2, "rotary_dim": 16}),
    "GPTNeoForCausalLM": (
        "gpt_neo",
        {"vocab_size": 320, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512,
         "bos_token_id": 0, "eos_token_id": 1},
    ),
    "SeedOssForCausalLM": ("seed_oss", {**_LLAMA_LIKE, "head_dim": 48, "attention_out_bias": True}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {**_LLAMA_LIKE, "head_dim": 48, "use_bias": True}),
    "Ernie4_5_MoeForCausalLM": (
        "ernie4_5_moe",
        {
            **_LLAMA_LIKE, **_PAD, "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2,
            "moe_intermediate_size": 128, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
            "moe_layer_end_index": 1, "use_bias": True,
        },
    ),
    "MinistralForCausalLM": ("ministral", {
        **_LLAMA_LIKE, "head_dim": 48, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "Ministral3ForCausalLM": (
        "ministral3",
        {
            **_LLAMA_LIKE, "head_dim": 48,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        },
    ),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        {**{name: each for name, each in {**_LLAMA_LIKE, **_LATENT}.items() if name != "first_k_dense_replace"},
         "mlp_layer_types": ["dense", "sparse"]},
    ),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {**_INDEXED, "n_group": 2, "topk_group": 1}),
    "GlmMoeDsaForCausalLM": (
        "glm_moe_dsa", {**_INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]}),
    "Dots1ForCausalLM": (
        "dots1",
        {
            **_LLAMA_LIKE, "head_dim": 48, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
            "moe_intermediate_size": 128, "first_k_dense_replace": 1, "attention_bias": True, "norm_topk_prob": True,
            "sliding_window": 16, "max_window_layers": 1,
        },
    ),
    "SolarOpenForCausalLM": (
        "solar_open",
        {**_LLAMA_LIKE, "head_dim": 48, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 128, "attention_bias": True},
    ),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {
        **_LLAMA_LIKE, "head_dim": 48, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 16,
    }),
    **GEMMA4, **FURTHER,
    # The family that the example plugin adds (tests/plugins).
    "ArceeForCausalLM": ("arcee", {**_LLAMA_LIKE, "tie_word_embeddings": False}),
    "GPTNeoXForCausalLM": (
        "gpt_neox",
        {
            **_COMMON, "intermediate_size": 256, "max_position_embeddings": 512, "rotary_pct": 0.25, "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}  # fmt: skip
