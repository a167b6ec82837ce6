"""Configs of further tiny random models, see tiny_models.py."""

from __future__ import annotations

from typing import Any

from tiny_indexed_models import INDEXED
from tiny_linear_models import LINEAR

_SIZES = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}
#: Standard deviation of the products with the matrices of fresh models; 1.5 for others. With more, Zamba 2's blocks
#: amplify the rounding of float32 until transformers is 0.02 nats from its own float64 (and aiakq as far).
SPREADS = {"ZambaForCausalLM": 0.7, "Zamba2ForCausalLM": 0.7}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    **LINEAR,
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {
            **_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 48, "v_head_dim": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "routed_scaling_factor": 1.5,
        },
    ),
    "ZambaForCausalLM": (
        "zamba",
        {
            **_SIZES, "num_hidden_layers": 5, "num_key_value_heads": 4, "mamba_d_state": 12, "mamba_dt_rank": 8,
            "attn_layer_period": 2, "attn_layer_offset": 1,
        },
    ),
    "RecurrentGemmaForCausalLM": (
        "recurrent_gemma",
        {
            **_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 128, "attention_window_size": 16,
            "intermediate_size": 512, "logits_soft_cap": 8.0,
        },
    ),
    "XGLMForCausalLM": (
        "xglm",
        {
            "vocab_size": 320, "d_model": 128, "num_layers": 2, "attention_heads": 4, "ffn_dim": 256,
            "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        },
    ),
    **INDEXED,
    "MiMoForCausalLM": ("mimo", {**_SIZES, "head_dim": 48}),
    "Zamba2ForCausalLM": (
        "zamba2",
        {
            **_SIZES, "num_hidden_layers": 5, "num_key_value_heads": 4, "mamba_d_state": 24, "n_mamba_heads": 8,
            "mamba_ngroups": 2, "chunk_size": 16, "num_mem_blocks": 2, "adapter_rank": 16, "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", {**_SIZES, "head_dim": 48, "rope_parameters": _ALPHA}),
    "HunYuanMoEV1ForCausalLM": (
        "hunyuan_v1_moe",
        {
            **_SIZES, "head_dim": 48, "intermediate_size": 128, "num_experts": 6, "moe_topk": 2,
            "rope_parameters": _ALPHA,
        },
    ),
}  # fmt: skip
