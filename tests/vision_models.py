"""Tiny random models that see images, with processors and a tokenizer, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

#: Kinds whose tokens of images have positions in three dimensions.
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
#: Kind -> special tokens of its prompts, after those of the tokenizer.
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES]
_SPECIAL = {
    "llava": ["<image>"],
    "llava_siglip": ["<image>"],
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    **dict.fromkeys(QWEN, ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]),
}
#: Kind -> special tokens that its processor finds by name.
_NAMED = {"gemma3": dict(zip(("boi_token", "eoi_token", "image_token"), _SPECIAL["gemma3"], strict=True))}
#: Kind -> its placeholder.
PLACEHOLDERS = {
    "llava": "<image>",
    "llava_siglip": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "mistral3": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
    **dict.fromkeys(QWEN, "<|image_pad|>"),
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
_TEXT = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
#: A template in which images come as parts, as in the published ones.
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|>"
    "<|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of single bytes with the special tokens of ``kind``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", *_SPECIAL[kind]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Gemma's tokenizer has tokens of several line ends.
    lines = ["\u010a" * count for count in range(2, 5)] if kind == "gemma3" else []
    vocab = {token: index for index, token in enumerate([*special, *alphabet, *lines])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(line[1:], line[:1]) for line in lines]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        **({"extra_special_tokens": _NAMED[kind]} if kind in _NAMED else {"additional_special_tokens": _SPECIAL[kind]}),
        chat_template=TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[kind]),
        clean_up_tokenization_spaces=False,
    )


def image_processor_of(kind: str) -> Any:
    """An image processor of Pillow's kind, as small as the encoder."""
    import importlib

    module, name, values = {
        "llava": ("clip", "CLIP", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
        "llava_siglip": ("siglip", "Siglip", {"size": {"height": 16, "width": 16}}),
        "idefics3": ("idefics3", "Idefics3", {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}),
        "smolvlm": ("smolvlm", "SmolVLM", {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}),
        "mistral3": ("pixtral", "Pixtral", {"size": {"longest_edge": 40}, "patch_size": {"height": 4, "width": 4}}),
        "gemma3": ("gemma3", "Gemma3", {"size": {"height": 16, "width": 16}}),
        "internvl": ("got_ocr2", "GotOcr2", {"size": {"height": 16, "width": 16}, "max_patches": 4}),
        **dict.fromkeys(
            QWEN, ("qwen2_vl", "Qwen2VL", {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}})
        ),
    }[kind]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{name}ImageProcessorPil")(**values)


#: Values of the config of Gemma 3, whose window is smaller than an image.
_GEMMA: dict[str, Any] = {
    "text_config": {
        **{"model_type": "gemma3_text", **_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16},
        **{"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    },
    "vision_config": {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
    **{"mm_tokens_per_image": 4, "image_token_id": 5, "boi_token_id": 3, "eoi_token_id": 4},
}


def config_of(kind: str) -> Any:
    """The config of the tiny model of ``kind``."""
    from transformers import AutoConfig

    llama = {"model_type": "llama", **_TEXT}
    token = 3 + _SPECIAL[kind].index(PLACEHOLDERS[kind])
    model_type, values = {
        "llava": (
            "llava",
            {
                "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
                "vision_feature_layer": -2,
            },
        ),
        "llava_siglip": (
            "llava",
            {
                "vision_config": {"model_type": "siglip_vision_model", **_VISION},
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
        ),
        "idefics3": ("idefics3", {"vision_config": {"model_type": "idefics3", **_VISION}, "scale_factor": 2}),
        "smolvlm": ("smolvlm", {"vision_config": {"model_type": "smolvlm_vision", **_VISION}, "scale_factor": 2}),
        "mistral3": (
            "mistral3",
            {
                "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16, "sliding_window": None},
                "vision_config": {"model_type": "pixtral", "head_dim": 16, **_VISION, "image_size": 64},
                "spatial_merge_size": 2,
                "vision_feature_layer": -1,
            },
        ),
        "internvl": (
            "internvl",
            {
                "text_config": {"model_type": "qwen2", **_TEXT},
                "vision_config": {
                    "model_type": "internvl_vision",
                    **_VISION,
                    "image_size": [16, 16],
                    "patch_size": [4, 4],
                },
                "image_seq_length": 4,
            },
        ),
        "gemma3": ("gemma3", _GEMMA),
        **_qwen_configs(),
    }[kind]
    return AutoConfig.for_model(
        model_type, **{"text_config": llama, "image_token_id": token, "pad_token_id": 2} | values
    )


_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_QWEN_TOKENS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "video_token_id": 6}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _qwen_configs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Kind -> model_type and values of the config."""
    halves = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
    return {
        "qwen2_vl": (
            "qwen2_vl",
            {
                "text_config": {"model_type": "qwen2_vl_text", **halves},
                "vision_config": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
                **_QWEN_TOKENS,
            },
        ),
        "qwen2_5_vl": (
            "qwen2_5_vl",
            {
                "text_config": {"model_type": "qwen2_5_vl_text", **halves},
                "vision_config": {
                    **{**_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64},
                    **{"window_size": 16, "fullatt_block_indexes": [1]},
                },
                **_QWEN_TOKENS,
            },
        ),
        **_qwen3_configs(),
    }


def _qwen3_configs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Those of the third generation."""
    third = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_position_embeddings": 16}
    delta = {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
        **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 32},
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return {
        "qwen3_vl": (
            "qwen3_vl",
            {
                "text_config": {
                    **{"model_type": "qwen3_vl_text", **_TEXT, "head_dim": 16},
                    "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
                },
                "vision_config": {**_QWEN_TOWER, **third, "deepstack_visual_indexes": [0, 1]},
                **_QWEN_TOKENS,
            },
        ),
        "qwen3_vl_moe": (
            "qwen3_vl_moe",
            {
                "text_config": {
                    **{"model_type": "qwen3_vl_moe_text", **_TEXT, "head_dim": 16, **experts},
                    "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
                },
                "vision_config": {**_QWEN_TOWER, **third, "deepstack_visual_indexes": [1]},
                **_QWEN_TOKENS,
            },
        ),
        "qwen3_5": (
            "qwen3_5",
            {
                "text_config": {"model_type": "qwen3_5_text", **_TEXT, **delta},
                "vision_config": {**_QWEN_TOWER, **third},
                **_QWEN_TOKENS,
            },
        ),
        "qwen3_5_moe": (
            "qwen3_5_moe",
            {
                "text_config": {"model_type": "qwen3_5_moe_text", **_TEXT, **delta, **experts},
                "vision_config": {**_QWEN_TOWER, **third},
                **_QWEN_TOKENS,
            },
        ),
    }


def save_vision_model(kind: str, folder: Path) -> Path:
    """Write a random model of ``kind`` with its tokenizer and image processor."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    image_processor_of(kind).save_pretrained(folder)
    if kind in QWEN:
        size = {"shortest_edge": 64, "longest_edge": 4096}
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"patch_size": 4, "size": size}))
    return folder


def random_video(seed: int, frames: int = 6, width: int = 16, height: int = 24) -> Any:
    """Frames of noise [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def random_image(seed: int, width: int = 30, height: int = 20) -> Image.Image:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def reference_logprobs(folder: Path, kind: str, ids: list[int], images: Sequence[Image.Image]) -> torch.Tensor:
    """Log-probabilities [T, V] that transformers computes for a whole sequence with ``images``, eager, in float32."""
    model, given = reference(folder, kind, ids, images, "eager")
    with torch.inference_mode():
        logits = model(**given).logits[0]
    return logits.log_softmax(-1)


def reference(
    folder: Path, kind: str, ids: list[int], images: Sequence[Image.Image], attention: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of transformers in float32 and what it is called with for a whole sequence with ``images``.

    The image processor gets all images at once, as transformers' processors call it.
    """
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    given = {"input_ids": torch.tensor([ids])}
    if images:
        options: dict[str, Any] = {"mistral3": {"patch_size": {"height": 8, "width": 8}}}.get(kind, {})
        options |= {"crop_to_patches": True} if kind == "internvl" else {}
        several = [list(images)] if kind in ("idefics3", "smolvlm") else list(images)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        processed = processor(several, return_tensors="pt", **options)
        names = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
        given |= {name: processed[name] for name in names if name in processed}
        if kind == "gemma3":
            given["token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
        if kind in QWEN:
            given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
    return model.eval(), given
