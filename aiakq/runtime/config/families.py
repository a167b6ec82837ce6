"""Every native family by its model_type, see family_keys.py."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.runtime.config.dense_families import DENSE
from aiakq.runtime.config.family_keys import Family
from aiakq.runtime.config.gemma3n import GEMMA3N
from aiakq.runtime.config.gemma4 import GEMMA4
from aiakq.runtime.config.recurrent_families import RECURRENT_FAMILIES
from aiakq.runtime.config.shared_experts_families import SHARED_EXPERTS
from aiakq.runtime.config.sparse_families import SPARSE

FAMILIES: Mapping[str, Family] = {
    **DENSE,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    **SPARSE,
    **RECURRENT_FAMILIES,
    **SHARED_EXPERTS,
}
#: Architecture -> model_type, where they differ by more than spelling.
MODEL_TYPES: Mapping[str, str] = {
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "GPTNeoForCausalLM": "gpt_neo",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "SolarOpenForCausalLM": "solar_open",
    "HYV4ForCausalLM": "hy_v4",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiMoForCausalLM": "mimo",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "KimiLinearForCausalLM": "kimi_linear",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
}
