"""What published checkpoints that hear audio have in config.json."""

from __future__ import annotations

from typing import Any

#: Name of a release -> its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2-Audio": {
        **{"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"},
        **{"audio_token_index": 151646, "ignore_index": -100, "torch_dtype": "bfloat16", "vocab_size": 156032},
        "transformers_version": "4.38.1",
        "audio_config": {
            **{"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32, "init_std": 0.02},
            **{"encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0, "d_model": 1280},
            **{"dropout": 0.0, "attention_dropout": 0.0, "activation_function": "gelu", "activation_dropout": 0.0},
            **{"scale_embedding": False, "max_source_positions": 1500},
        },
        "text_config": {
            **{"bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "model_type": "qwen2"},
            **{"max_position_embeddings": 8192, "rope_theta": 10000, "rms_norm_eps": 1e-5, "sliding_window": 32768},
            **{"torch_dtype": "bfloat16", "use_mrope": False, "vocab_size": 156032},
        },
    },
    "Voxtral Mini": {
        **{"architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_token_id": 24},
        **{"hidden_size": 3072, "projector_hidden_act": "gelu", "torch_dtype": "bfloat16", "vocab_size": 131072},
        "transformers_version": "4.54.0.dev0",
        "audio_config": {
            **{"model_type": "voxtral_encoder", "hidden_size": 1280, "num_attention_heads": 20, "head_dim": 64},
            **{"num_key_value_heads": 20, "num_hidden_layers": 32, "intermediate_size": 5120, "num_mel_bins": 128},
            **{"max_source_positions": 1500, "activation_function": "gelu", "initializer_range": 0.02},
            **{"scale_embedding": False, "vocab_size": 51866},
            **dict.fromkeys(("activation_dropout", "attention_dropout", "dropout", "layerdrop"), 0.0),
        },
        "text_config": {
            **{"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu"},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0},
            **{"rope_scaling": None, "sliding_window": None, "attention_bias": False, "attention_dropout": 0.0},
            **{"mlp_bias": False, "pretraining_tp": 1, "use_cache": True, "vocab_size": 131072},
            **{"initializer_range": 0.02, "torch_dtype": "bfloat16"},
        },
    },
}
