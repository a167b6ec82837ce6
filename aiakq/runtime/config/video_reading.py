"""VideoReading: how files of videos are read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error

#: Largest number of frames of a video, before some of them are sampled.
MAX_FRAMES = 2048
#: Frames in a second of a video, from one in eleven days on, and their number: times are computed without overflow.
MIN_FPS, MAX_FPS, MAX_TOTAL_FRAMES = 1e-6, 1e6, (1 << 31) - 1
#: Frames of a file that are sampled, as in vLLM.
DEFAULT_NUM_FRAMES = 32


@dataclass(frozen=True)
class VideoReading:
    """How files of videos are read (--media-io-kwargs).

    num_frames  frames that are sampled from an animated file, at even distances; None for all.
    fps         of separate image files; of animated files, the most that are sampled in a second. None if not given.
    """

    num_frames: int | None = DEFAULT_NUM_FRAMES
    fps: float | None = None

    @staticmethod
    def from_argument(given: Mapping[str, object] | None, default: VideoReading | None = None) -> VideoReading:
        """Return what --media-io-kwargs says of videos, and ``default`` what it does not. Raises ``bad_option``."""
        default = default or VideoReading()
        video = (given or {}).get("video", {})
        values: Mapping[str, Any] = video if isinstance(video, Mapping) else {"video": video}
        frames, fps = values.get("num_frames", default.num_frames or -1), values.get("fps", default.fps or -1)
        is_valid = type(frames) is int and (frames == -1 or 0 < frames <= MAX_FRAMES)
        is_valid = is_valid and type(fps) in (int, float) and (fps == -1 or MIN_FPS <= fps <= MAX_FPS)
        if not is_valid or values.keys() - {"num_frames", "fps"} or (given or {}).keys() - {"video"}:
            raise error(
                "bad_option",
                option="--media-io-kwargs",
                value=dict(given or {}),
                expected=f'{{"video": {{"num_frames": up to {MAX_FRAMES}, or -1 for all, "fps": {MIN_FPS:g} to '
                f"{MAX_FPS:g}}}}}",
                hint="",
            )
        return VideoReading(None if frames == -1 else frames, None if fps == -1 else float(fps))
