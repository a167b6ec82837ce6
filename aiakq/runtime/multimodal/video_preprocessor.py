"""VideoPreprocessor: what a video is in a prompt and for its encoder. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.config.multimodal import MAX_ENCODER_CACHE_TOKENS
from aiakq.runtime.multimodal.config_keys import completed_config, special_token
from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor
from aiakq.runtime.multimodal.processed import Processed, record
from aiakq.runtime.multimodal.video_families import VIDEO_FAMILIES
from aiakq.runtime.multimodal.video_processor import VideoProcessor, stated_video_processor
from aiakq.runtime.multimodal.videos import Video, VideoFiles, video_of_files

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


class VideoPreprocessor(MediaPreprocessor):
    """Samples, sizes and divides the frames of videos, as transformers' video processors do.

    arguments  names of what --mm-processor-kwargs may have for videos.
    """

    kind = "video"

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer) -> None:
        """Raises as ``VideoProcessor``, and ``processor_key_unsupported`` for a video processor of another family."""
        super().__init__(config, tokenizer)
        completed, self._reading = completed_config(config.raw), config.video_reading
        named = special_token(tokenizer, config.folder)
        self._text = VIDEO_FAMILIES[config.architecture](completed, self.placeholder, named)
        self.begins_alone = self._text.begins_alone
        stated, kind = stated_video_processor(config.folder) if config.folder else {}, self._text.processor
        if (other := stated.get("video_processor_type", kind)) != kind:
            fields = {"key": "video_processor_type", "value": f"{other!r:.64}", "kind": kind}
            raise error("processor_key_unsupported", file="the file of the video processor", **fields)
        self._processor = VideoProcessor(kind, stated, config.processor_kwargs, completed["vision_config"])
        self.arguments = self._processor.arguments

    @classmethod
    def load(cls, config: MultimodalConfig, tokenizer: Tokenizer) -> VideoPreprocessor:
        """Load the video processor of a model. Raises as ``__init__``, and ``model_malformed``."""
        try:
            return cls(config, tokenizer)
        except (AiakqError, MemoryError):
            raise
        except Exception as failure:
            file = f"the video processor in '{config.folder}'"
            raise error("model_malformed", file=file, reason=first_line(failure)[:200]) from failure

    def processed(self, media: Video | VideoFiles, param: str) -> Processed:
        """See ``MediaPreprocessor``."""
        video = media if isinstance(media, Video) else video_of_files(media, self._reading, param)
        frames = self._processor.frames(video, MAX_ENCODER_CACHE_TOKENS, param)
        tensors = {"pixel_values_videos": record(frames.pixels), "video_grid_thw": record(np.array([frames.grid]))}
        text, grid, times = self._text.text(frames), self._text.frame_grid(frames), self._text.times(frames)
        return Processed(tensors, text, grid=grid, times=times)
