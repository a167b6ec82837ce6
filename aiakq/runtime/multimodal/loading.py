"""What preprocesses the media of a model, according to their kind. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor
    from aiakq.runtime.text.tokenizer import Tokenizer


def load_preprocessor(config: MultimodalConfig, tokenizer: Tokenizer) -> MediaPreprocessor:
    """Return what preprocesses the media of a model.

    Raises ``no_pillow``, ``unsupported_parameter``, ``processor_key_unsupported``, ``model_malformed``,
    ``model_incomplete``, and ``bad_option`` for arguments that its processor does not take.
    """
    if config.kind == "audio":
        from aiakq.runtime.multimodal.audio import AudioPreprocessor

        return AudioPreprocessor(config, tokenizer)
    from aiakq.runtime.multimodal.processor import ImagePreprocessor

    return ImagePreprocessor.load(config, tokenizer)
