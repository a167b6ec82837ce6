"""How each family writes a video in its prompt, and where in time its frames are. No torch.

The rules are those of transformers' processors and models; see ``families`` for images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiakq.runtime.multimodal.families import SpecialToken
from aiakq.runtime.multimodal.video_processor import Frames


class VideoText(ABC):
    """How a family writes a video.

    processor     class of transformers whose rules its frames follow.
    begins_alone  whether its text may not follow other text, with which it would be tokenized.
    """

    processor = "Qwen2VLVideoProcessor"
    begins_alone = False

    def __init__(self, config: Mapping[str, Any], video_token: str, special_token: SpecialToken) -> None:
        """config: config.json with all defaults. special_token: see ``ImageText``."""
        self.vision, self.video_token, self.special_token = config["vision_config"], video_token, special_token
        self.together = int(self.vision["temporal_patch_size"])

    @abstractmethod
    def text(self, frames: Frames) -> str:
        """Return the text of a video, with a placeholder for each embedding."""

    def times(self, frames: Frames) -> list[int]:
        """Return the positions in time of frames that follow each other; [] if there is text between them."""
        return []

    def frame_grid(self, frames: Frames) -> tuple[int, int]:
        """Return the rows and columns of a frame's placeholders."""
        merge = int(self.vision["spatial_merge_size"])
        return frames.grid[1] // merge, frames.grid[2] // merge

    def _tokens(self, frames: Frames) -> str:
        """Return the placeholders of a frame."""
        rows, columns = self.frame_grid(frames)
        return self.video_token * (rows * columns)


class Qwen2VideoText(VideoText):
    """The placeholders of all frames, which are one position apart."""

    def text(self, frames: Frames) -> str:
        """See VideoText."""
        return self._tokens(frames) * frames.grid[0]

    def times(self, frames: Frames) -> list[int]:
        """See VideoText."""
        return list(range(frames.grid[0]))


class Qwen25VideoText(Qwen2VideoText):
    """The placeholders of all frames, whose positions follow from their time in seconds."""

    def times(self, frames: Frames) -> list[int]:
        """See VideoText. transformers multiplies in float32. What is far behind any prompt is refused later on."""
        seconds = np.float32(self.together / frames.sampled_fps)
        interval = np.float32(self.vision["tokens_per_second"]) * seconds
        positions = np.minimum(np.arange(frames.grid[0]).astype(np.float32) * interval, np.float32(1 << 40))
        listed: list[int] = positions.astype(np.int64).tolist()
        return listed


class Qwen3VideoText(VideoText):
    """The time before each frame, whose placeholders are between two tokens (Qwen3-VL and 3.5)."""

    processor = "Qwen3VLVideoProcessor"
    begins_alone = True

    def text(self, frames: Frames) -> str:
        """See VideoText."""
        together, times = self.together, [number / frames.fps for number in frames.indices]
        times += [times[-1]] * (-len(times) % together)
        start = self.special_token("vision_start_token", "<|vision_start|>")
        placeholders = start + self._tokens(frames) + self.special_token("vision_end_token", "<|vision_end|>")
        middles = ((times[at] + times[at + together - 1]) / 2 for at in range(0, len(times), together))
        return "".join(f"<{middle:.1f} seconds>{placeholders}" for middle in middles)


#: Architecture -> how it writes videos.
VIDEO_FAMILIES: Mapping[str, type[VideoText]] = {
    "Qwen2VLForConditionalGeneration": Qwen2VideoText,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VideoText,
    "Qwen3VLForConditionalGeneration": Qwen3VideoText,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VideoText,
    "Qwen3_5ForConditionalGeneration": Qwen3VideoText,
    "Qwen3_5MoeForConditionalGeneration": Qwen3VideoText,
}
