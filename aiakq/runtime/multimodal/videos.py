"""Decoding of videos: frames as arrays, as image files, or in an animated GIF, PNG or WebP. Frames are read one by one.

Pillow is imported with the first of them.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.config.video_reading import MAX_FPS, MAX_FRAMES, MAX_TOTAL_FRAMES, MIN_FPS, VideoReading
from aiakq.runtime.multimodal.images import FORMATS, as_rgb, decode_image, is_image, refused

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats whose files may have several frames.
ANIMATED = ("GIF", "PNG", "WEBP")
#: Frames per second of separate image files, as in vLLM.
DEFAULT_FPS = 1.0
#: Largest number of pixels of all frames of an animated file, each of which is decoded twice.
MAX_ANIMATED_PIXELS = 1 << 30
#: Milliseconds that viewers show a frame for whose file says 0.
_USUAL_DELAY = 100.0
#: Metadata of vLLM; the latter ones follow from the others, or are names.
_METADATA = (
    *("fps", "total_num_frames", "frames_indices", "do_sample_frames"),
    *("duration", "width", "height", "video_backend"),
)
_CONTAINERS = (
    "it is no video: data:video/jpeg;base64,FRAME,FRAME,... with JPEG files is expected, or an animated file in one of "
    f"the formats {', '.join(ANIMATED)}; containers such as MP4 are not read"
)


@dataclass(frozen=True)
class Video:
    """The frames of a video.

    frame       returns frame number 0 .. count - 1 in RGB.
    count       number of frames that are there.
    fps         frames per second of the whole video; None if unknown.
    total       number of frames of the whole video.
    indices     numbers in the whole video of those that are there.
    may_sample  whether the model's processor may leave out some; None: if all of the video's are there.
    """

    frame: Callable[[int], Image]
    count: int
    fps: float | None = None
    total: int = 0
    indices: list[int] = field(default_factory=list)
    may_sample: bool | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all frames of the video are there."""
        return self.count == self.total and self.indices == list(range(self.total))

    @staticmethod
    def whole(frame: Callable[[int], Image], count: int) -> Video:
        """Return a video of ``count`` frames of which nothing else is known."""
        return Video(frame, count, total=count, indices=list(range(count)))


#: Files of a video: that of an animation, or one for each frame.
VideoFiles = Sequence[bytes]


def video_of_files(files: VideoFiles, reading: VideoReading, param: str) -> Video:
    """Return the video of an animated file, or of an image file for each frame. Raises ``media_refused``."""
    check_frames(len(files), param)
    if len(files) == 1 and (found := _animation(files[0], reading, param)) is not None:
        return found
    count = len(files)
    fps = DEFAULT_FPS if reading.fps is None else reading.fps

    def frame(number: int) -> Image:
        return decode_image(files[number], f"{param} (frame {number})")

    return Video(frame, count, fps, count, list(range(count)), may_sample=False)


def check_frames(count: int, param: str) -> None:
    """Raise ``media_refused`` for a video of no frames, or of too many."""
    if not 0 < count <= MAX_FRAMES:
        raise refused(param, f"it has {count} frames, of at least 1 and at most {MAX_FRAMES}")


def _animation(data: bytes, reading: VideoReading, param: str) -> Video | None:
    """Return the frames of an animated file, as many as ``reading`` says; None for an image.

    Raises ``media_refused``.
    """
    from PIL import UnidentifiedImageError

    try:
        animation = _Animation(data, param)
    except UnidentifiedImageError:
        raise refused(param, _CONTAINERS) from None
    except Exception as failure:
        raise _damaged(failure, param) from None
    count = animation.count
    if count == 1:
        return None
    check_frames(count, param)
    width, height = animation.size
    if count * width * height > MAX_ANIMATED_PIXELS:
        most = f"of at most {MAX_ANIMATED_PIXELS >> 20} million pixels in all"
        raise refused(param, f"it has {count} frames of {width} x {height} pixels, {most}")
    seconds = sum(map(animation.delay, range(count))) / 1000.0
    return _sampled(Video(animation.frame, count, count / seconds, count, list(range(count))), seconds, reading)


class _Animation:
    """An animated file, whose frames are read one after the other.

    count  number of its frames.
    size   width and height of them.
    """

    def __init__(self, data: bytes, param: str) -> None:
        """Raises what Pillow does."""
        self._data, self._param = data, param
        self._image = self._opened()
        self.size: tuple[int, int] = self._image.size
        self.count: int = getattr(self._image, "n_frames", 1) if self._image.format in ANIMATED else 1

    def frame(self, number: int) -> Image:
        """Return a frame in RGB. Raises ``media_refused``."""
        try:
            if number < self._image.tell():  # decoders go forward
                self._image = self._opened()
            self._image.seek(number)
            return as_rgb(self._image, self._param)
        except AiakqError:
            raise
        except Exception as failure:
            raise _damaged(failure, self._param) from None

    def delay(self, number: int) -> float:
        """Return how many milliseconds a frame is shown. Decoders know it when they have decoded the frame."""
        self.frame(number)
        stated = self._image.info.get("duration") or 0.0
        return float(stated) if 0 < stated < math.inf else _USUAL_DELAY

    def _opened(self) -> Any:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(self._data), formats=FORMATS)


def _sampled(video: Video, seconds: float, reading: VideoReading) -> Video:
    """Return as many frames of a video as ``reading`` says, at even distances. What remains is not sampled again."""
    wanted = video.count
    if reading.num_frames is not None:
        wanted = min(wanted, reading.num_frames)
    if reading.fps is not None:
        wanted = min(wanted, max(1, math.floor(seconds * reading.fps)))
    if wanted == video.count:
        return video
    step = (video.count - 1) / max(wanted - 1, 1)
    indices = [int(number * step) for number in range(wanted)]
    indices[-1] = video.count - 1 if wanted > 1 else 0
    frame = video.frame
    return Video(lambda number: frame(indices[number]), wanted, video.fps, video.total, indices, may_sample=False)


def _damaged(failure: Exception, param: str) -> AiakqError:
    """Return the error for what a decoder raises, which may be anything."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "DecompressionBombError":
        return refused(param, "it takes too much memory")
    return refused(param, f"it is damaged ({first_line(failure).rstrip('.')[:120]})")


def listed_videos(value: object) -> list[object]:
    """Return the videos of ``multi_modal_data["video"]``: one, or a list of them.

    A video is an array [frames, height, width, 3], a list of frames, or one of these with a dict of metadata.
    """
    if not isinstance(value, (list, tuple)) or _is_with_metadata(value) or _is_frames(value):
        return [value]
    return list(value)


def video_of(value: object, param: str) -> Video:
    """Return a video of ``LLM``; see ``listed_videos``. Raises ``invalid_type`` and ``media_refused``."""
    metadata: Mapping[str, object] = {}
    if _is_with_metadata(value):
        value, metadata = value  # type: ignore[misc]
    if isinstance(value, (list, tuple)) and _is_frames(value):
        frames = list(value)
        video = Video.whole(lambda number: _frame(frames[number], param), len(frames))
    elif _dimensions(value) == 4:
        array = _pixels(value, param)
        video = Video.whole(lambda number: _frame(array[number], param), len(array))
    else:
        reason = (
            "an array [frames, height, width, 3] of uint8 is expected, or a list of frames, or either in a tuple with "
        )
        raise error("invalid_type", param=param, reason=f"{reason}metadata, not {type(value).__name__:.64}")
    check_frames(video.count, param)
    return _with_metadata(video, metadata, param) if metadata else video


def _with_metadata(video: Video, metadata: Mapping[str, Any], param: str) -> Video:
    """Return a video with what vLLM's metadata say. Raises ``media_refused`` for values that contradict its frames."""
    for name in metadata:
        if name not in _METADATA:
            raise refused(f"{param}.{str(name)[:64]}", f"metadata of a video are {', '.join(_METADATA)}")
    total, fps = metadata.get("total_num_frames", None), metadata.get("fps")
    indices: Any = metadata.get("frames_indices")
    samples = metadata.get("do_sample_frames")
    total = video.count if total is None else total
    if not _is_number(total, Integral) or not video.count <= total <= MAX_TOTAL_FRAMES:
        raise _wrong(param, "total_num_frames", f"an integer of at least {video.count}, the number of its frames,")
    total = int(total)
    if fps is not None and not (_is_number(fps, Real) and MIN_FPS <= fps <= MAX_FPS):
        raise _wrong(param, "fps", f"a number from {MIN_FPS:g} to {MAX_FPS:g}")
    if indices is None:
        if total != video.count:
            raise _wrong(param, "frames_indices", f"the numbers of its {video.count} frames among {total}")
        indices = list(range(video.count))
    found = _integers(indices)
    is_ascending = all(before <= after for before, after in zip([0, *found], found, strict=False))
    if len(found) != video.count or not is_ascending or found[-1] >= total:
        raise _wrong(param, "frames_indices", f"{video.count} ascending numbers below {total}")
    speed = None if fps is None else float(fps)
    made = Video(video.frame, video.count, speed, total, found, samples)
    if not (samples is None or isinstance(samples, bool)) or (samples and not made.is_whole):
        raise _wrong(param, "do_sample_frames", "a bool, and not true for frames that are sampled already,")
    return made


def _is_number(value: object, kind: type) -> bool:
    """Whether ``value`` is a number of a ``kind`` of the standard library, which those of NumPy are, too."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _integers(values: Any) -> list[int]:
    """Return a list, array or tensor of integers; [] for anything else."""
    if _dimensions(values) == 1:
        values = values.tolist()
    is_listed = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    return [int(each) for each in values] if is_listed and all(_is_number(each, Integral) for each in values) else []


def _wrong(param: str, name: str, expected: str) -> AiakqError:
    return refused(f"{param}.{name}", f"{expected} is expected")


def _is_with_metadata(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[1], Mapping)


def _is_frames(value: Sequence[object]) -> bool:
    return bool(value) and all(is_image(frame) or _dimensions(frame) == 3 for frame in value)


def _dimensions(value: object) -> int:
    return len(getattr(value, "shape", ()))


def _frame(frame: Any, param: str) -> Image:
    from PIL import Image

    return as_rgb(frame if is_image(frame) else Image.fromarray(_pixels(frame, param)), param)


def _pixels(value: Any, param: str) -> Any:
    """Return an array of pixels. Raises ``invalid_type`` for other numbers than uint8, and without three colors."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype != np.uint8 or array.shape[-1] != 3:
        reason = f"frames [height, width, 3] of uint8 are expected, not {list(array.shape)} of {array.dtype}"
        raise error("invalid_type", param=param, reason=reason)
    return array
