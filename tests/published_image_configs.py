"""What published checkpoints have in config.json and in the files of their image processors, without the language
model's keys: trimmed to the keys whose handling is tested.
"""

from __future__ import annotations

from typing import Any

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_STEPS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
_QWEN_PROCESSOR = {
    **{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    **{"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "image_processor_type": "Qwen2VLImageProcessor"},
}
_QWEN_TOKENS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "video_token_id": 151656}
_ROPE = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
_THIRD = {
    **{"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3},
    **{"initializer_range": 0.02, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304},
    **{"out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}

#: Name of a release -> its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "LLaVA 1.5": {
        **{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100},
        **{"image_token_index": 32000, "pad_token_id": 32001, "projector_hidden_act": "gelu", "vocab_size": 32064},
        **{"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "tie_word_embeddings": False},
        **{"torch_dtype": "float16", "transformers_version": "4.36.2", "image_seq_length": 576},
        "text_config": {"model_type": "llama", "_name_or_path": "lmsys/vicuna-7b-v1.5", "vocab_size": 32064},
        "vision_config": {
            **{"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
            **{"vocab_size": 32000},
        },
    },
    "Pixtral": {
        **{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100},
        **{"image_seq_length": 1, "image_token_index": 10, "projector_hidden_act": "gelu"},
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "torch_dtype": "bfloat16"},
        "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "sliding_window": None},
        "vision_config": {
            **{"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "is_composition": True},
            **{"model_type": "pixtral", "patch_size": 16, "rope_theta": 10000.0, "tie_word_embeddings": False},
        },
    },
    "SmolVLM2": {
        **{"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "image_token_id": 49190},
        **{"pad_token_id": 128002, "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "float32"},
        **{"use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49280},
        "text_config": {
            **{"architectures": ["VLlama3ForCausalLM"], "model_type": "llama", "is_llama_config": True},
            **{"neftune_noise_alpha": 0.0, "pixel_shuffle_factor": 4, "qk_layer_norms": False, "use_resampler": False},
        },
        "vision_config": {
            **{"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}},
            **{"model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16},
            **{"size": {"longest_edge": 2048}, "tie_word_embeddings": False, "use_base_siglip": False},
        },
    },
    "Idefics3": {
        **{"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 49153},
        **{"image_seq_len": 81, "scale_factor": 3, "tie_word_embeddings": False, "vocab_size": 49155},
        "text_config": {"model_type": "llama", "vocab_size": 49155},
        "vision_config": {
            **{"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "idefics3"},
            **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
            **{"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}, "use_base_siglip": True},
        },
    },
    "Mistral Small 3.1": {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10},
        **{"multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2},
        **{"vision_feature_layer": -1, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
        "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "sliding_window": None},
        "vision_config": {
            **{"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024},
            **{"image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral"},
            **{"num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14},
            **{"rope_theta": 10000.0},
        },
    },
    "InternVL3": {
        **{"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "image_token_id": 151667},
        **{
            "downsample_ratio": 0.5,
            "image_seq_length": 256,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
        },
        **{"vision_feature_select_strategy": "default", "torch_dtype": "bfloat16"},
        "text_config": {"model_type": "qwen2", "hidden_size": 896},
        "vision_config": {
            **{"architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0},
            **{"dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1024, "image_size": [448, 448]},
            **{"initializer_factor": 0.1, "initializer_range": 1e-10, "layer_norm_eps": 1e-06},
            **{"layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm"},
            **{"num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14]},
            **{"projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True},
            **{"use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False},
        },
    },
    "Qwen2-VL": {
        **{"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", **_QWEN_TOKENS},
        **{"image_token_id": 151655, "vision_token_id": 151654, "hidden_size": 1536, "max_window_layers": 28},
        **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000.0},
        **{"sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936},
        "vision_config": {
            **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536},
            **{"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
        },
    },
    "Qwen2.5-VL, written by transformers 4.5x": {
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **_QWEN_TOKENS},
        **{"image_token_id": 151655, "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 36},
        **{"rope_scaling": _ROPE, "rope_theta": 1000000.0, "sliding_window": 32768, "vocab_size": 151936},
        "text_config": {
            **{"model_type": "qwen2_5_vl_text", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 36},
            **{"rope_scaling": _ROPE, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 151936},
        },
        "vision_config": {
            **{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
            **{"in_chans": 3, "in_channels": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2},
            **{"spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
            **{"tokens_per_second": 2, "temporal_patch_size": 2, "model_type": "qwen2_5_vl"},
        },
    },
    "Qwen3-VL": {
        **{"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", **_QWEN_TOKENS},
        **{"dtype": "bfloat16", "image_token_id": 151655, "tie_word_embeddings": False, "use_cache": False},
        "text_config": {"model_type": "qwen3_vl_text", "hidden_size": 4096},
        "vision_config": {**_THIRD, "deepstack_visual_indexes": [8, 16, 24], "model_type": "qwen3_vl"},
    },
    "Qwen3.5": {
        **{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", **_QWEN_TOKENS},
        **{"image_token_id": 248056, "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0"},
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 1024},
        "vision_config": {**_THIRD, "deepstack_visual_indexes": [], "model_type": "qwen3_5"},
    },
    "Gemma 3": {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144},
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106]},
        **{"initializer_range": 0.02, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16"},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
        "vision_config": {
            **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14},
            **{"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27},
            **{"vision_use_head": False},
        },
    },
}
#: Kind of the tiny models -> (preprocessor_config.json, processor_config.json) of a published model of its family.
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {
            **{"crop_size": {"height": 336, "width": 336}, "do_center_crop": True, **_STEPS, "resample": 3},
            **{"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "image_processor_type": "CLIPImageProcessor"},
            **{"processor_class": "LlavaProcessor", "rescale_factor": 1 / 255, "size": {"shortest_edge": 336}},
            **{"feature_extractor_type": "CLIPFeatureExtractor", "_valid_processor_keys": ["images", "do_resize"]},
        },
        {
            **{"image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14},
            **{"processor_class": "LlavaProcessor", "vision_feature_select_strategy": "default"},
        },
    ),
    "smolvlm": (
        {
            **{**_STEPS, "do_image_splitting": True, "do_pad": True, "image_processor_type": "SmolVLMImageProcessor"},
            **{"max_image_size": {"longest_edge": 512}, "processor_class": "SmolVLMProcessor", "resample": 1},
            **{"size": {"longest_edge": 2048}},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
        {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
    ),
    "mistral3": (
        {
            **{"crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None},
            **{"do_center_crop": None, **_STEPS, "image_processor_type": "PixtralImageProcessor"},
            **{"input_data_format": None, "patch_size": {"height": 14, "width": 14}, "return_tensors": None},
            **{"processor_class": "PixtralProcessor", "resample": 3, "size": {"longest_edge": 1540}},
        },
        {
            **{"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]"},
            **{"patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2},
        },
    ),
    "internvl": (
        {
            **{"crop_size": None, "crop_to_patches": False, "data_format": "channels_first", "max_patches": 12},
            **{**_STEPS, "image_processor_type": "GotOcr2ImageProcessorFast", "min_patches": 1},
            **{"processor_class": "InternVLProcessor", "size": {"height": 448, "width": 448}},
        },
        {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    ),
    "qwen2_5_vl": ({**_QWEN_PROCESSOR, "processor_class": "Qwen2_5_VLProcessor"}, {}),
}
