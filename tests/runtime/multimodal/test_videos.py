"""Files and arrays of videos: which frames are read, at what time, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vision_models import random_image, random_video

from aiakq.errors import AiakqError
from aiakq.runtime.config.video_reading import VideoReading
from aiakq.runtime.multimodal.videos import listed_videos, video_of, video_of_files

ALL = VideoReading(num_frames=None)


def encoded(frames: Any, kind: str, duration: Any = 100) -> bytes:
    """An animated file, or a single frame's."""
    images = [Image.fromarray(frame) for frame in frames]
    out = io.BytesIO()
    several = {"save_all": True, "append_images": images[1:], "duration": duration, "lossless": True}
    images[0].save(out, kind, **(several if len(images) > 1 else {}))
    return out.getvalue()


def flat(count: int) -> np.ndarray:
    """Frames of one color each, which every format keeps."""
    return np.stack([np.full((8, 12, 3), 10 * number, np.uint8) for number in range(count)])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_files_have_their_frames_and_their_speed(kind):
    video = video_of_files([encoded(flat(5), kind, [100, 300, 200, 200, 200])], ALL, "v")
    assert (video.count, video.total, video.indices, video.may_sample) == (5, 5, [0, 1, 2, 3, 4], None)
    assert video.fps == pytest.approx(5.0)
    found = [np.asarray(video.frame(number))[0, 0].tolist() for number in (0, 3, 1)]
    assert found == [[0] * 3, [30] * 3, [10] * 3]


def test_frames_without_a_delay_are_shown_as_viewers_show_them():
    assert video_of_files([encoded(flat(4), "GIF", 0)], ALL, "v").fps == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("reading", "indices", "samples"),
    [
        (VideoReading(), list(np.linspace(0, 39, 32, dtype=int)), False),
        (VideoReading(4), [0, 13, 26, 39], False),
        (VideoReading(1), [0], False),
        (VideoReading(40), list(range(40)), None),
        (ALL, list(range(40)), None),
        (VideoReading(32, 2.0), list(np.linspace(0, 39, 8, dtype=int)), False),  # of 4 seconds
        (VideoReading(32, 0.1), [0], False),
    ],
)
def test_frames_of_files_are_sampled_as_in_vllm(reading, indices, samples):
    colors = np.stack([np.full((4, 4, 3), 6 * number, np.uint8) for number in range(40)])
    video = video_of_files([encoded(colors, "WEBP")], reading, "v")
    assert (video.indices, video.may_sample, video.total, video.fps) == (indices, samples, 40, pytest.approx(10.0))
    last = np.asarray(video.frame(video.count - 1))[0, 0, 0]
    assert last == 6 * indices[-1]


def test_frames_that_are_files_are_all_read():
    files = [encoded(frame[None], "PNG") for frame in random_video(1, 40, 8, 8)]
    video = video_of_files(files, VideoReading(), "v")
    assert (video.count, video.fps, video.may_sample) == (40, 1.0, False)
    assert video_of_files(files, VideoReading(fps=2.5), "v").fps == 2.5
    assert video_of_files(files[:1], VideoReading(), "v").count == 1


def test_arrays_and_lists_of_frames():
    frames = random_video(1, 3)
    images = [Image.fromarray(frame) for frame in frames]
    for value in (frames, list(frames), images, tuple(images)):
        assert len(listed_videos(value)) == 1
        video = video_of(value, "v")
        assert video.count == 3 and video.fps is None and video.may_sample is None
        assert (np.asarray(video.frame(2)) == frames[2]).all()
    assert len(listed_videos([frames, images])) == len(listed_videos([(frames, {"fps": 2})])) + 1 == 2
    with_metadata = video_of((frames, {"fps": 2, "total_num_frames": 9, "frames_indices": np.array([0, 4, 8])}), "v")
    assert (with_metadata.fps, with_metadata.total, with_metadata.indices) == (2.0, 9, [0, 4, 8])


def test_metadata_may_be_numbers_of_numpy():
    frames = random_video(1, 3)
    given = {"fps": np.float32(2), "total_num_frames": np.int64(9), "frames_indices": torch.tensor([0, 4, 8])}
    video = video_of((frames, given), "v")
    assert (video.fps, video.total, video.indices, video.is_whole) == (2.0, 9, [0, 4, 8], False)
    assert type(video.total) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("frames_indices", value)
            for value in ("012", "abc", b"\0\1\2", [None] * 3, [0.5, 1.5, 2.5], {0, 1, 2}, [0, 1])
        ],
        *[("fps", value) for value in (True, "2", float("nan"), 1e-300, 1e300)],
        *[("total_num_frames", value) for value in (True, 3.0, 1 << 31)],
        *[("do_sample_frames", value) for value in (1, "no", np.array([1, 2]))],
    ],
)
def test_wrong_metadata_are_refused(name, value):
    given = {"frames_indices": [0, 1, 2], name: value}
    with pytest.raises(AiakqError, match=rf"v\.{name} cannot be read"):
        video_of((random_video(1, 3), given), "v")


def test_the_length_of_a_video_takes_no_memory():
    given = {"total_num_frames": (1 << 31) - 1, "frames_indices": [0, 1, 2]}
    assert not video_of((random_video(1, 3), given), "v").is_whole


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([b"\x00\x00\x00\x18ftypmp42" + bytes(64)], "it is no video: .* containers such as MP4 are not read"),
        ([b"nonsense", b"nonsense"], r"v \(frame 0\) cannot be read: it is no image"),
        ([], "it has 0 frames"),
        ([b""] * 2049, "it has 2049 frames, of at least 1 and at most 2048"),
        ([encoded(random_video(1, 5), "GIF")[:-300]], "it is damaged"),
        ([encoded(random_video(1, 5, 20, 20), "WEBP")[:300]], "it is damaged|it is no video"),
    ],
)
def test_files_that_are_refused(files, reason):
    with pytest.raises(AiakqError, match=reason) as caught:
        video = video_of_files(files, VideoReading(), "v")
        for number in range(video.count):
            video.frame(number)
    assert caught.value.id == "media_refused"


def test_an_animation_of_too_many_frames_is_refused():
    frames = (np.arange(2050)[:, None, None, None] % 251 * np.ones((1, 1, 1, 3))).astype(np.uint8)
    with pytest.raises(AiakqError, match="it has 2050 frames"):
        video_of_files([encoded(frames, "GIF")], VideoReading(), "v")


def test_an_animation_that_takes_long_to_decode_is_refused():
    """A small file, whose frames are shown over each other."""
    data = encoded(np.zeros((1, 4000, 4000, 3), np.uint8), "GIF")
    palette = 13 + (3 * 2 ** ((data[10] & 7) + 1) if data[10] & 128 else 0)
    with pytest.raises(
        AiakqError, match="it has 70 frames of 4000 x 4000 pixels, of at most 1024 million pixels in all"
    ):
        video_of_files([data[:palette] + data[palette:-1] * 70 + b";"], VideoReading(), "v")


@pytest.mark.parametrize(
    "given",
    [
        {"video": {"num_frames": 0}},
        {"video": {"num_frames": 2049}},
        {"video": {"fps": 0}},
        {"video": {"fps": "2"}},
        {"video": {"backend": "opencv"}},
        {"image": {}},
        {"video": 3},
    ],
)
def test_wrong_settings_are_refused(given):
    with pytest.raises(AiakqError, match="--media-io-kwargs"):
        VideoReading.from_argument(given)


def test_files_are_read_as_the_arguments_say():
    assert VideoReading.from_argument(None) == VideoReading(32, None)
    assert VideoReading.from_argument({"video": {"num_frames": -1, "fps": 2}}) == VideoReading(None, 2.0)
    assert VideoReading.from_argument({"video": {"num_frames": 16}}) == VideoReading(16, None)
    assert random_image(1).size == (30, 20)
