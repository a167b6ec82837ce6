"""What preprocesses the media of a model, according to their kinds. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.preprocessor import PromptMedia

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


def load_media_preprocessors(config: MultimodalConfig, tokenizer: Tokenizer) -> PromptMedia:
    """Return what puts the media of a model into its prompts.

    Videos that cannot be preprocessed are among its ``failures``: images are read nevertheless.

    Raises ``no_pillow``, ``unsupported_parameter``, ``processor_key_unsupported``, ``model_malformed``,
    ``model_incomplete``, and ``bad_option`` for arguments that its processors do not take.
    """
    if config.kind == "audio":
        from aiakq.runtime.multimodal.audio import AudioPreprocessor

        return PromptMedia(tokenizer, [AudioPreprocessor(config, tokenizer)])
    from aiakq.runtime.multimodal.processor import ImagePreprocessor
    from aiakq.runtime.multimodal.video_preprocessor import VideoPreprocessor

    if "video" not in config.max_items or "video" in config.refusals:
        return PromptMedia(tokenizer, [ImagePreprocessor.load(config, tokenizer)])
    try:
        videos = VideoPreprocessor.load(config, tokenizer)
    except AiakqError as failure:
        if failure.id == "bad_option":
            raise
        return PromptMedia(tokenizer, [ImagePreprocessor.load(config, tokenizer)], {"video": failure})
    return PromptMedia(tokenizer, [ImagePreprocessor.load(config, tokenizer, videos.arguments), videos])
