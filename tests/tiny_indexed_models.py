"""Configs of tiny random models whose attention selects positions by an index, see tiny_models.py."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
#: Heads of 48 + 16 elements over latents of 32, and 8 experts.
_LATENT = {
    **_SIZES, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16, "v_head_dim": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 128, "routed_scaling_factor": 1.5, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
#: Enough index heads that no two scores are equal: transformers breaks ties in no stated order.
_INDEX = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
INDEXED: dict[str, tuple[str, dict[str, Any]]] = {
    "HYV4ForCausalLM": (
        "hy_v4",
        {
            **_LATENT,
            **_INDEX,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "swiglu_limit": 0.5,
            "learnable_sink_init": 0.3,
        },
    ),
    "AXK2ForCausalLM": ("axk2", {**_LATENT, **_INDEX, "gated_norm_rank": 16}),
}
