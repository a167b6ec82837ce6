"""Tiny random multimodal models, as transformers builds and writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_HEADS = {**_TEXT, "head_dim": 16}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_AUDIO = {"num_mel_bins": 16, "max_source_positions": 32}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64}
_QWEN3_TOWER = {**_QWEN_TOWER, "patch_size": 14, "num_position_embeddings": 16}


def _text(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **_TEXT, **changes}


def _tower(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **_TOWER, **changes}


_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Model type -> its config. Between them, they have every spelling of the decoder's names.
COMPOSITE: dict[str, dict[str, Any]] = {
    "llava": {"text_config": _text("llama"), "vision_config": _tower("clip_vision_model"), "image_token_index": 300},
    "qwen2_vl": {
        "text_config": _text("qwen2_vl_text", **_SECTIONS),
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN,
    },
    "qwen2_5_vl": {
        "text_config": _text("qwen2_5_vl_text", **_SECTIONS),
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [1]},
        **_QWEN,
    },
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", **_HEADS, **_SECTIONS},
        "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]},
        **_QWEN,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **{"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, **_HEADS, **_SECTIONS},
        },
        "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]},
        **_QWEN,
    },
    "qwen3_5": {
        "text_config": {"model_type": "qwen3_5_text", **_HEADS, **_DELTA_RULE},
        "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": []},
        **_QWEN,
    },
    "qwen3_5_moe": {
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            **_HEADS,
            **_DELTA_RULE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": []},
        **_QWEN,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_HEADS, "sliding_window": 24},
        "vision_config": _tower("siglip_vision_model"),
        "mm_tokens_per_image": 4,
        "image_token_index": 300,
        "boi_token_index": 301,
        "eoi_token_index": 302,
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text",
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "per_layer_config": {layer: {"head_dim": 32} for layer in (1, 3)},
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **{name: _TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
            "model_type": "gemma4_vision",
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 14,
            "position_embedding_size": 16,
        },
        "image_token_id": 300,
        "boi_token_id": 301,
        "eoi_token_id": 302,
        "video_token_id": 303,
        "audio_token_id": 304,
        "boa_token_id": 305,
        "eoa_token_index": 306,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_HEADS},
        "vision_config": _tower("pixtral", head_dim=16),
        "image_token_index": 300,
    },
    "internvl": {
        "text_config": _text("qwen2"),
        "vision_config": _tower("internvl_vision", image_size=[28, 28], patch_size=[14, 14]),
        "image_token_id": 300,
    },
    "smolvlm": {"text_config": _text("llama"), "vision_config": _tower("smolvlm_vision"), "image_token_id": 300},
    "idefics3": {"text_config": _text("llama"), "vision_config": _tower("idefics3_vision"), "image_token_id": 300},
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            **_HEADS,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        "vision_config": {
            **_TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 300,
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **_HEADS},
        "audio_config": {
            "model_type": "voxtral_encoder",
            **{name: _TOWER[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
            "intermediate_size": 128,
            **_AUDIO,
        },
        "audio_token_id": 300,
    },
    "qwen2_audio": {
        "text_config": _text("qwen2"),
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_ffn_dim": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            **_AUDIO,
        },
        "audio_token_index": 300,
    },
}


def build(kind: str, folder: Path) -> Any:
    """Write a random model of a type to ``folder``, and return it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**COMPOSITE[kind])
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "SomeProcessor"}))
    return model.eval()
