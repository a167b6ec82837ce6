"""The keys of further families with recurrent layers, see family_keys.py."""

from __future__ import annotations

from aiakq.runtime.config.family_keys import ATTENTION_BIAS, Family, llama_keys
from aiakq.runtime.config.sparse_families import MAMBA

RECURRENT_FAMILIES: dict[str, Family] = {
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
}
