"""VideoProcessor: what transformers' video processors of Qwen2-VL and Qwen3-VL compute, which need torchvision.

Frames are sampled, sized and divided into patches by their rules. Pillow resizes them, as it does images: fewer than 1
in 100 of its values differ from torchvision's, by 2 of 255 at most. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import read_json
from aiakq.runtime.multimodal.config_keys import HARMLESS_PROCESSOR_KEYS, is_effectless, processor_config
from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.videos import Video

if TYPE_CHECKING:
    from PIL.Image import Image

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_COMMON: dict[str, Any] = {
    **{"do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"do_convert_rgb": True, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768},
    **{"num_frames": None, "cap_pixels_per_frame": None},
}
#: Class of transformers -> its defaults.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        **_COMMON,
        **_CLIP,
        **{"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "patch_size": 14},
        **{"do_sample_frames": False, "fps": None, "max_video_tokens": 128000, "min_pixels": None, "max_pixels": None},
    },
    "Qwen3VLVideoProcessor": {
        **_COMMON,
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        **{"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "patch_size": 16},
        **{"do_sample_frames": True, "fps": 2, "max_video_tokens": 768},
    },
}
#: Frames per second of a video that says nothing about it, in transformers.
_UNKNOWN_FPS = 24
#: Arguments that are no user's choice: the encoder reads one layout of patches only.
_FIXED = frozenset({"patch_size", "merge_size", "temporal_patch_size"})
#: Keys of a video processor's files without effect on Qwen's -> why.
_HARMLESS: Mapping[str, str] = {
    **HARMLESS_PROCESSOR_KEYS,
    "video_processor_type": "it is a name",
    "crop_size": "nothing is cropped",
    "do_center_crop": "nothing is cropped",
    "do_pad": "nothing is padded",
    "default_to_square": "sizes are multiples of patches",
    "return_metadata": "it is asked for where it is needed",
    "video_metadata": "each video has its own",
    "device": "pixels are computed on the CPU",
    "data_format": "the layout is that of the encoder",
    "input_data_format": "frames are in one layout",
}
_MAX_RATIO = 200
#: Numbers that may be None.
_OPTIONAL = frozenset({"fps", "num_frames", "min_pixels", "max_pixels"})


@dataclass(frozen=True)
class Frames:
    """Frames of a video as the encoder reads them.

    pixels      patches [T * rows * columns * merge**2, 3 * temporal_patch_size * patch**2] float32.
    grid        [T, rows, columns] of patches.
    indices     numbers of the frames in the whole video.
    fps         frames per second of the whole video.
    sampled_fps  of these frames.
    """

    pixels: NDArray[np.float32]
    grid: tuple[int, int, int]
    indices: list[int]
    fps: float
    sampled_fps: float


class VideoProcessor:
    """Samples, resizes, and normalizes the frames of videos, and divides them into patches.

    arguments  names of what --mm-processor-kwargs may have for it.
    """

    def __init__(
        self, kind: str, stated: Mapping[str, Any], given: Mapping[str, Any], vision: Mapping[str, Any]
    ) -> None:
        """kind: the class of transformers; stated: its file; given: --mm-processor-kwargs; vision: ``vision_config``.

        Raises ``processor_key_unsupported`` for keys of the file that nothing reads, and ``model_malformed`` for values
        that do not fit to the encoder.
        """
        self.kind, defaults = kind, DEFAULTS[kind]
        self.arguments = frozenset(defaults) - _FIXED
        for key, value in stated.items():
            if key not in defaults and not is_effectless(key, value, _HARMLESS):
                fields = {"file": "the file of the video processor", "key": key[:64], "value": f"{value!r:.64}"}
                raise error("processor_key_unsupported", kind=kind, **fields)
        known = {name: value for name, value in stated.items() if name in defaults and value is not None}
        self._values = values = {**defaults, **known, **{n: v for n, v in given.items() if n in self.arguments}}
        size: dict[str, Any] = dict(known.get("size", defaults["size"]))
        for source in (known, given):  # what the user gives replaces what the file says
            size = dict(source.get("size") or size)
            for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
                size[edge] = (name in defaults and source.get(name)) or size.get(edge)
        self._check(size, vision)
        self._check_given(given)
        self._least, self._most = int(size["shortest_edge"]), int(size["longest_edge"])
        self.patch, self.merge = int(values["patch_size"]), int(values["merge_size"])
        self.together = int(values["temporal_patch_size"])
        self._factor = self.patch * self.merge

    def _check(self, size: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
        reasons = [
            f"its size has no {edge}" for edge in ("shortest_edge", "longest_edge") if not isinstance(size[edge], int)
        ]
        for name, own in (("patch_size", 14), ("spatial_merge_size", 2), ("temporal_patch_size", 2)):
            found, wanted = self._values[name.removeprefix("spatial_")], vision.get(name, own)
            if found != wanted:
                reasons.append(f"its {name} is {found!r:.16}, and that of the encoder {wanted!r:.16}")
        if reasons:
            raise error("model_malformed", file="the file of the video processor", reason=reasons[0])

    def _check_given(self, given: Mapping[str, Any]) -> None:
        """Raise ``bad_option`` for values of another type than the defaults, and for numbers that are not positive."""
        for name in sorted(self.arguments & given.keys()):
            value, usual = given[name], DEFAULTS[self.kind][name]
            if isinstance(usual, bool):
                is_valid, expected = isinstance(value, bool), "a bool"
            elif isinstance(usual, (int, float, type(None))) and name not in ("resample", "cap_pixels_per_frame"):
                is_number = type(value) in ((int, float) if name in ("fps", "rescale_factor") else (int,))
                is_valid, expected = (
                    (value is None and name in _OPTIONAL) or (is_number and value > 0),
                    "a number above 0",
                )
            else:  # the image processor, which has them too, has tried them
                continue
            if not is_valid:
                raise error(
                    "bad_option",
                    option="--mm-processor-kwargs",
                    value=dict(given),
                    expected=f"{expected} for {name} of the video processor",
                    hint="",
                )

    def frames(self, video: Video, max_patches: int, param: str) -> Frames:
        """Return the frames of a video that the encoder reads.

        max_patches  of merged ones, which are tokens.

        Raises ``media_refused`` for more, for frames of different sizes, and what transformers' class rejects.
        """
        try:
            chosen = self._chosen(video)
            first = video.frame(chosen[0])
            width, height = first.size
            rows, columns = self._resized(len(chosen), height, width)
            if not (rows and columns):
                raise ValueError(f"its frames of {width} x {height} pixels are too small")
        except AiakqError:
            raise
        except (ValueError, ZeroDivisionError, IndexError) as failure:
            raise refused(param, f"the model's video processor rejects it ({str(failure).rstrip('.')})") from None
        groups = -(-len(chosen) // self.together)
        grid = groups, rows // self.patch, columns // self.patch
        tokens = groups * (rows // self._factor) * (columns // self._factor)
        if tokens > max_patches:
            reason = (
                f"it takes {tokens} tokens, more than the {max_patches} of the encoder cache; send fewer or smaller"
            )
            raise refused(param, f"{reason} frames")
        pixels = self._pixels(video, chosen, first, grid, param)
        indices = [video.indices[number] for number in chosen]
        fps = float(video.fps or _UNKNOWN_FPS)
        # transformers takes the frames that are read for as fast as the whole video if nobody says how fast that is.
        return Frames(pixels, grid, indices, fps, len(indices) / video.total * fps if video.fps else fps)

    def _samples(self, video: Video) -> bool:
        """Whether some frames may be left out: not of a video that somebody has sampled already."""
        wanted = self._values["do_sample_frames"] if video.may_sample is None else video.may_sample
        return bool(wanted) and video.is_whole

    def _chosen(self, video: Video) -> list[int]:
        """Return the numbers of the frames that are read. Raises ValueError as transformers' classes do."""
        if not self._samples(video):
            return list(range(video.count))
        wanted, fps = self._values["num_frames"], self._values["fps"]
        if wanted is not None and fps is not None:
            raise ValueError("num_frames and fps exclude each other")
        if wanted is None and fps is None and self.kind == "Qwen2VLVideoProcessor":
            raise ValueError("to sample frames, it needs num_frames or fps")
        if self.kind == "Qwen2VLVideoProcessor":
            return self._chosen_evenly(video, wanted, fps)
        total, least, most = video.count, self._values["min_frames"], self._values["max_frames"]
        if wanted is None:
            speed = total if fps is None else int(total / (video.fps or _UNKNOWN_FPS) * fps)
            wanted = min(max(speed, least), most, total if fps is not None else most)
        spread: list[int] = np.linspace(0, total - 1, wanted).round().astype(int).tolist()
        return spread

    def _chosen_evenly(self, video: Video, wanted: int | None, fps: float | None) -> list[int]:
        """Return those of Qwen2-VL: the first of each of as many equal parts."""
        total, together = video.count, self.together
        if wanted is not None:
            wanted = round(wanted / together) * together
        else:
            if video.fps is None:
                raise ValueError("to sample by fps, the frames per second of the video have to be known")
            assert fps is not None
            most = math.floor(min(self._values["max_frames"], total) / together) * together
            parts = min(max(total / video.fps * fps, self._values["min_frames"]), most, total)
            wanted = math.floor(parts / together) * together
        if wanted > total:
            raise ValueError(f"{wanted} frames are to be sampled from {total}")
        step = total / wanted
        # torch.arange computes in double precision, and rounds to float32 before the fraction is cut off.
        starts: list[int] = (np.arange(math.ceil(total / step)) * step).astype(np.float32).astype(int).tolist()
        return starts

    def _resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the frames, multiples of merged patches. Raises ValueError."""
        if not self._values["do_resize"]:
            if height % self._factor or width % self._factor:
                raise ValueError(f"without do_resize, sides have to be multiples of {self._factor}")
            return height, width
        caps, factor, most = bool(self._values["cap_pixels_per_frame"]), self._factor, self._most
        ceiling, floor = int(self._values["max_video_tokens"]), int(self._least * 1.05)
        if self.kind == "Qwen2VLVideoProcessor":
            if caps:
                share = int(ceiling * factor * factor * 0.9) * self.together // count
                most = max(min(most, share), floor)
            return smart_resize(1, height, width, factor, self._least, most, 1)
        if count < self.together:
            raise ValueError(f"it has {count} frames, fewer than the {self.together} that are encoded together")
        if caps:
            most = max(min(ceiling * factor * factor, most // count), floor) * count
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(count, height, width, factor, self._least, most, self.together)

    def _pixels(
        self, video: Video, chosen: Sequence[int], first: Image, grid: tuple[int, int, int], param: str
    ) -> NDArray[np.float32]:
        groups, rows, columns = grid
        patch, merge, together = self.patch, self.merge, self.together
        patches = np.empty((groups, rows * columns, 3 * together * patch * patch), np.float32)
        shape = (together, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        for group in range(groups):
            numbers = [*chosen[group * together : (group + 1) * together]]
            numbers += [numbers[-1]] * (together - len(numbers))
            frames = [first if number == chosen[0] else video.frame(number) for number in numbers]
            if any(frame.size != first.size for frame in frames):
                raise refused(param, "its frames have different sizes")
            arrays = [self._array(frame, rows * patch, columns * patch) for frame in frames]
            # Of each merged square: color, time, row and column in the patch.
            divided = np.stack(arrays).reshape(shape).transpose(2, 5, 3, 6, 1, 0, 4, 7)
            patches[group] = divided.reshape(patches.shape[1:])
        return patches.reshape(-1, patches.shape[-1])

    def _array(self, frame: Image, height: int, width: int) -> NDArray[np.float32]:
        """Return [3, height, width] numbers as transformers rescales and normalizes them, in one step."""
        values = self._values
        # First the width, as torch does; Pillow begins with what is faster, and clips other values in between.
        for size in ((width, frame.height), (width, height)):
            frame = frame if frame.size == size else frame.resize(size, values["resample"])
        pixels = np.asarray(frame).astype(np.float32).transpose(2, 0, 1)
        scale = values["rescale_factor"] if values["do_rescale"] else 1.0
        if values["do_normalize"]:
            mean, deviation = (
                (np.array(values[name], np.float32) * np.float32(1.0 / scale))[:, None, None]
                for name in ("image_mean", "image_std")
            )
            normalized: NDArray[np.float32] = (pixels - mean) / deviation
            return normalized
        return pixels * np.float32(scale)


def smart_resize(
    count: int, height: int, width: int, factor: int, least: int, most: int, together: int
) -> tuple[int, int]:
    """Return height and width as multiples of ``factor`` with which ``count`` frames have ``least`` to ``most`` pixels
    (Wang et al. 2024, arXiv:2409.12191). Raises ValueError for a narrow strip.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > _MAX_RATIO:
        raise ValueError(f"one side is {ratio:.0f} times as long as the other, of at most {_MAX_RATIO}")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(count / together) * together * rows * columns
    if pixels > most:
        beta = math.sqrt(count * height * width / most)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif pixels < least:
        beta = math.sqrt(least / (count * height * width))
        rows = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return rows, columns


def stated_video_processor(folder: str) -> dict[str, Any]:
    """Return the file of a model's video processor, which may be that of its images; {} without one.

    Raises ``model_malformed`` if it is no object.
    """
    inside = processor_config(folder).get("video_processor")
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        path = Path(folder, name)
        if inside is None and path.exists():
            inside = read_json(path, name)
    if inside is not None and not isinstance(inside, dict):
        raise error("model_malformed", file=f"the video processor in '{folder}'", reason="it is no object")
    return inside or {}
