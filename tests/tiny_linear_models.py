"""Configs of tiny random models with linear attention, see tiny_models.py."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LINEAR: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniMaxForCausalLM": (
        "minimax",
        {
            **_SIZES, "num_key_value_heads": 2, "head_dim": 48, "num_local_experts": 6, "num_experts_per_tok": 2,
            "block_size": 16, "full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.9,
        },
    ),
    "KimiLinearForCausalLM": (
        "kimi_linear",
        {
            **_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
            "v_head_dim": 40, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 128,
            "routed_scaling_factor": 1.5, "pad_token_id": 2, "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 8, "q_lora_rank": None, "linear_num_heads": 3, "linear_head_dim": 32,
        },
    ),
}  # fmt: skip
