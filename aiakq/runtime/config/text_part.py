"""The text part of multimodal checkpoints: config.json with a ``text_config`` inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: model_type of a ``text_config`` -> its architecture.
_TEXT_MODELS = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
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
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
#: Keys that a multimodal config.json has at its top level.
_SHARED = ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "aiakq")


def has_text_part(raw: Mapping[str, object]) -> bool:
    """Whether config.json ``raw`` describes a multimodal model that contains a language model."""
    return isinstance(raw.get("text_config"), dict)


def text_part(raw: Mapping[str, Any]) -> dict[str, object]:
    """Return the config of the language model inside ``raw`` with transformers 5's keys, or ``raw`` without one.

    Such files omit values that are defaults of transformers' class, so that class completes them. Raises ValueError
    for values that it rejects.
    """
    if not has_text_part(raw):
        return dict(raw)
    inside = dict(raw["text_config"])
    kind = str(inside.get("model_type", ""))
    text = _completed(kind, inside)
    text |= {name: raw[name] for name in _SHARED if raw.get(name) is not None and text.get(name) is None}
    # transformers' classes have the output layer, and tie it as the outer config says; a stored one is used anyway.
    if raw.get("tie_word_embeddings") or ("tie_word_embeddings" not in inside and "tie_word_embeddings" in raw):
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            text[key] = raw[key]
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
