"""The text part of multimodal checkpoints: config.json with a ``text_config`` inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.errors import error
from aiakq.runtime.config.gemma3n import media_embedders

#: model_type of a ``text_config`` -> its architecture.
_TEXT_MODELS = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
#: model_type of files -> values of transformers' class of the outer model that a ``text_config`` may leave out.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "voxtral": {
        **{"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05},
        "rope_theta": 1e8,
    }
}
#: model_type of files whose keys of the language model are not in a ``text_config`` but beside ``vision_config``.
_FLAT = ("qwen2_vl", "qwen2_5_vl")
#: Keys of such files that are not the language model's.
_OUTER = (
    *("architectures", "quantization_config", "vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
)
#: Keys that a multimodal config.json has at its top level.
_SHARED = ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "aiakq")


def has_text_part(raw: Mapping[str, object]) -> bool:
    """Whether config.json ``raw`` describes a multimodal model that contains a language model."""
    return isinstance(raw.get("text_config"), dict) or _is_flat(raw)


def _is_flat(raw: Mapping[str, object]) -> bool:
    return raw.get("model_type") in _FLAT and isinstance(raw.get("vision_config"), dict) and "text_config" not in raw


def with_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the keys of its language model in a ``text_config``, where newer files have them."""
    if not _is_flat(raw):
        return dict(raw)
    outer = {name: value for name, value in raw.items() if name in (*_OUTER, *_SHARED, "model_type")}
    inside = {name: value for name, value in raw.items() if name not in _OUTER}
    return {**outer, "text_config": {**inside, "model_type": text_kind(raw)}}


def text_kind(raw: Mapping[str, Any]) -> str:
    """Return the model_type of the language model inside ``raw``, which has one.

    Raises ``text_model_unnamed`` if neither it nor the model around it tells.
    """
    if _is_flat(raw):
        return f"{raw['model_type']}_text"
    kind = raw["text_config"].get("model_type") or _usual_kind(raw)
    if kind is None:
        raise error("text_model_unnamed", outer=str(raw.get("model_type"))[:80])
    return str(kind)


def _usual_kind(raw: Mapping[str, Any]) -> str | None:
    """Return the model_type that transformers assumes inside a model, or None if it does not know that model."""
    from transformers import CONFIG_MAPPING  # imported late, because it takes seconds

    if raw.get("model_type") not in CONFIG_MAPPING:
        return None
    inside = CONFIG_MAPPING[raw["model_type"]]().get_text_config()
    return str(inside.model_type) if inside.model_type else None


def text_part(raw: Mapping[str, Any]) -> dict[str, object]:
    """Return the config of the language model inside ``raw`` with transformers 5's keys, or ``raw`` without one.

    Such files omit values that are defaults of transformers' class, so that class completes them. Raises ValueError
    for values that it rejects.
    """
    if not has_text_part(raw):
        return dict(raw)
    kind = text_kind(raw)
    inside = {name: raw[name] for name in raw if name not in _OUTER} if _is_flat(raw) else dict(raw["text_config"])
    defaults = dict(_DEFAULTS.get(str(raw.get("model_type")), {}))
    if isinstance(rope := inside.get("rope_parameters"), dict) and "rope_theta" in rope:
        defaults.pop("rope_theta", None)
    inside = {**defaults, **inside}
    inside["model_type"] = kind
    text = _completed(kind, inside)
    if kind == "qwen3_vl_moe_text" and not text.setdefault("norm_topk_prob", True):
        raise ValueError("norm_topk_prob is false, but transformers' class normalizes the weights of experts")
    text |= {name: raw[name] for name in _SHARED if raw.get(name) is not None and text.get(name) is None}
    # transformers' classes have the output layer, and tie it as the outer config says; a stored one is used anyway.
    if raw.get("tie_word_embeddings") or ("tie_word_embeddings" not in inside and "tie_word_embeddings" in raw):
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            text[key] = raw[key]
    if raw.get("model_type") == "gemma3n":
        text["media_embedders"] = media_embedders(raw)
    architectures = raw.get("architectures")
    text["architectures"] = [_TEXT_MODELS[kind]] if kind in _TEXT_MODELS else architectures
    return text


def _completed(kind: str, inside: dict[str, object]) -> dict[str, object]:
    from transformers import CONFIG_MAPPING  # imported late, because it takes seconds

    if kind not in CONFIG_MAPPING:
        return inside
    try:
        completed: dict[str, object] = CONFIG_MAPPING[kind].from_dict(inside).to_dict()
    except Exception as problem:  # transformers may raise anything for invalid values
        raise ValueError(f"text_config: {problem}") from problem
    return completed
