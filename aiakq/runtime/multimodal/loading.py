"""What preprocesses the media of a model, according to their kinds and the settings of requests. No torch."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.runtime.config.video_reading import VideoReading
from aiakq.runtime.multimodal.preprocessor import MediaInput as MediaInput
from aiakq.runtime.multimodal.preprocessor import PromptMedia
from aiakq.runtime.protocol.media import MediaSettings

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


#: Settings of requests whose preprocessors are kept.
_MAX_KEPT = 8


class MediaPreprocessors:
    """What puts the media of a model into its prompts, as the engine's arguments say or a request's ``MediaSettings``.

    default  as the arguments say.
    """

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer) -> None:
        """Raises as ``load_media_preprocessors``."""
        self._config, self._tokenizer = config, tokenizer
        self.default = load_media_preprocessors(config, tokenizer)
        self._kept: OrderedDict[str, PromptMedia] = OrderedDict()

    def of(self, settings: MediaSettings) -> PromptMedia:
        """Return those of ``settings``. Raises as ``load_media_preprocessors``, but ``value_out_of_range`` for
        arguments that the processors do not take.
        """
        if not settings:
            return self.default
        key = json.dumps([settings.processor_kwargs, settings.io_kwargs], sort_keys=True, default=repr)
        if key not in self._kept:
            self._kept[key] = self._loaded(settings)
        self._kept.move_to_end(key)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def _loaded(self, settings: MediaSettings) -> PromptMedia:
        config, name, value = self._config, "media_io_kwargs", settings.io_kwargs
        try:
            reading = VideoReading.from_argument(settings.io_kwargs, config.video_reading)
            name, value = "mm_processor_kwargs", settings.processor_kwargs
            given = {**config.processor_kwargs, **settings.processor_kwargs}
            changed = replace(config, video_reading=reading, processor_kwargs=given)
            return load_media_preprocessors(changed, self._tokenizer)
        except AiakqError as failure:
            if failure.id != "bad_option":
                raise
            allowed = str(failure.fields["expected"])[:300]
            raise error("value_out_of_range", param=name, value=f"{value!r:.64}", allowed=allowed) from None


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
