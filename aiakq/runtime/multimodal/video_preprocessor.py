"""VideoPreprocessor: videos become what the encoder reads and the text that takes the place of their placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiakq.errors import AiakqError, error
from aiakq.runtime.config.multimodal import MAX_ENCODER_CACHE_TOKENS
from aiakq.runtime.multimodal.families import SpecialToken
from aiakq.runtime.multimodal.preprocessor import Processed, record
from aiakq.runtime.multimodal.video_families import VIDEO_FAMILIES
from aiakq.runtime.multimodal.video_processor import VideoProcessor, stated_video_processor
from aiakq.runtime.multimodal.videos import Video, VideoFiles, video_of_files

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


class VideoPreprocessor:
    """Preprocesses videos, one at a time.

    token_id   the placeholder, of which there is also one for each embedding.
    token      its text.
    arguments  names of what --mm-processor-kwargs may have for videos.
    """

    def __init__(
        self, config: MultimodalConfig, completed: Mapping[str, Any], tokenizer: Tokenizer, named: SpecialToken
    ) -> None:
        """completed: config.json with all defaults.

        Raises as ``VideoProcessor``, and ``processor_key_unsupported`` for a video processor of another family.
        """
        self.token_id, self._reading = config.video_token_id, config.video_reading
        [self.token] = tokenizer.raw_tokens([config.video_token_id])
        self._text = VIDEO_FAMILIES[config.architecture](completed, self.token, named)
        stated, kind = stated_video_processor(config.folder) if config.folder else {}, self._text.processor
        if (other := stated.get("video_processor_type", kind)) != kind:
            fields = {"key": "video_processor_type", "value": f"{other!r:.64}", "kind": kind}
            raise error("processor_key_unsupported", file="the file of the video processor", **fields)
        self._processor = VideoProcessor(kind, stated, config.processor_kwargs, completed["vision_config"])
        self.arguments = self._processor.arguments

    def processed(self, video: Video | VideoFiles, param: str) -> Processed:
        """Return a video, or that of files. Raises ``media_refused``."""
        found = video if isinstance(video, Video) else video_of_files(video, self._reading, param)
        frames = self._processor.frames(found, MAX_ENCODER_CACHE_TOKENS, param)
        tensors = {"pixel_values_videos": record(frames.pixels), "video_grid_thw": record(np.array([frames.grid]))}
        return Processed(
            tensors,
            self._text.text(frames),
            grid=self._text.frame_grid(frames),
            times=self._text.times(frames),
            begins_alone=self._text.begins_alone,
        )


def load_videos(
    config: MultimodalConfig, completed: Mapping[str, Any], tokenizer: Tokenizer, named: SpecialToken
) -> tuple[VideoPreprocessor | None, AiakqError | None]:
    """Return the preprocessor of videos, or why it cannot be loaded; neither for a model that reads none.

    Raises ``bad_option`` for arguments that it does not take.
    """
    if config.video_refusal or config.video_token_id < 0 or config.architecture not in VIDEO_FAMILIES:
        return None, None
    try:
        return VideoPreprocessor(config, completed, tokenizer, named), None
    except AiakqError as failure:
        if failure.id == "bad_option":
            raise
        return None, failure
