"""Multimodal models whose decoder can be quantized."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import first_architecture
from aiakq.runtime.config.encoder_families import encoder_of
from aiakq.runtime.config.text_part import has_text_part, text_part
from aiakq.runtime.models import ARCHITECTURES

#: model_type of models whose decoder, given text alone, was compared with the language model that it is.
COMPARED = frozenset(
    {
        *("gemma3", "gemma4", "idefics3", "internvl", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen2_audio"),
        *("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral"),
    }
)
_TEXT = "text-generation"


def is_composite(config: Mapping[str, object]) -> bool:
    """Whether this config.json is that of a model with towers beside its decoder, as transformers builds it."""
    from transformers import CONFIG_MAPPING

    return has_text_part(config) and config.get("model_type") in CONFIG_MAPPING


def pipeline_tag(config: Mapping[str, object]) -> str:
    """Return the hub's word for what the model of this config.json does."""
    if not predicts_text(config):
        architecture = first_architecture(config)
        return "text-classification" if architecture.endswith("ForSequenceClassification") else "feature-extraction"
    if not is_composite(config):
        return _TEXT
    return "audio-text-to-text" if "audio_config" in config else "image-text-to-text"


def predicts_text(config: Mapping[str, object]) -> bool:
    """Whether the model of this config.json predicts text; encoders do not."""
    return encoder_of(first_architecture(config)) is None


def checked_decoder(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config of the decoder inside the model of this config.json.

    Raises ``model_malformed``, and ``unsupported`` if it is not known to be a native language model.
    """
    try:
        inside = text_part(config)
    except ValueError as problem:
        raise error("model_malformed", file="config.json", reason=str(problem)[:200]) from None
    outer, kind = str(config.get("model_type")), inside.get("model_type")
    if first_architecture(inside) not in ARCHITECTURES:
        raise _unsupported(outer, f"aiakq has no native model for its decoder, {kind!s:.80}")
    if outer not in COMPARED:
        raise _unsupported(outer, f"its decoder, {kind!s:.80}, was never compared with the language model of that name")
    return inside


def _unsupported(outer: str, reason: str) -> AiakqError:
    hint = "Multimodal models that can be quantized: " + ", ".join(sorted(COMPARED)) + "."
    return error("unsupported", what=f"Quantizing the decoder of {outer:.80} ({reason})", hint=hint)
