"""Configs of tiny random models of Gemma 3n and 4, see tiny_models.py."""

from __future__ import annotations

from typing import Any

#: Six layers: two of a kind and one of another, twice, of which the last three have no keys.
GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4ForCausalLM": (
        "gemma4_text",
        {
            "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32,
            "intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
            "eos_token_id": 1, "pad_token_id": 2, "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "per_layer_config": {layer: {"head_dim": 64, "num_key_value_heads": 1} for layer in (2, 5)},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
            },
            "attention_k_eq_v": True, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        {
            "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32,
            "intermediate_size": [256, 192, 256, 256, 192, 256], "num_key_value_heads": 2,
            "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
            "sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300,
            "final_logit_softcapping": 5.0, "laurel_rank": 16, "altup_num_inputs": 3, "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.7, 0.0],
        },
    ),
}  # fmt: skip
