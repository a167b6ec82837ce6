"""VideoProcessor: frames, sizes and patches as transformers' classes compute them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_models import image_processor_of, random_video

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.video_processor import DEFAULTS, VideoProcessor, stated_video_processor
from aiakq.runtime.multimodal.videos import video_of

VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
SIZE = {"shortest_edge": 64, "longest_edge": 1024}
FIVE = {"fps": 5.0, "total_num_frames": 150, "frames_indices": list(range(0, 150, 3)), "do_sample_frames": False}
#: Class, arguments, frames, height, width, metadata -> grid of patches, frames, and their number per second, recorded
#: with torchvision 0.28 and transformers 5.23.
RECORDED: list[tuple[Any, ...]] = [
    ("2", {}, 5, 16, 24, None, (3, 4, 6), [0, 1, 2, 3, 4], 24.0),
    ("2", {}, 3, 20, 30, {"fps": 8.0}, (2, 4, 8), [0, 1, 2], 8.0),
    ("2", {"fps": 2, "do_sample_frames": True}, 24, 8, 8, {"fps": 8.0}, (3, 2, 2), [0, 4, 8, 12, 16, 20], 2.0),
    ("2", {"num_frames": 6, "do_sample_frames": True}, 50, 7, 40, None, (3, 2, 10), [0, 8, 16, 25, 33, 41], 24.0),
    ("2", {}, 50, 64, 64, FIVE, (25, 8, 8), list(range(0, 150, 3)), 50 / 150 * 5),
    ("3", {}, 5, 16, 24, None, (2, 2, 4), [0, 1, 3, 4], 24.0),
    ("3", {}, 24, 8, 8, {"fps": 8.0}, (3, 2, 2), [0, 5, 9, 14, 18, 23], 2.0),
    ("3", {"fps": None, "num_frames": 6}, 50, 7, 40, {"fps": 8.0}, (3, 2, 6), [0, 10, 20, 29, 39, 49], 0.96),
    ("3", {"fps": 4}, 24, 64, 64, {"fps": 8.0}, (6, 2, 2), [0, 2, 4, 6, 8, 10, 13, 15, 17, 19, 21, 23], 4.0),
    ("3", {}, 50, 8, 8, FIVE, (25, 2, 2), list(range(0, 150, 3)), 50 / 150 * 5),
]


def processor(kind: str = "2", stated: dict[str, Any] | None = None, **given: Any) -> VideoProcessor:
    return VideoProcessor(
        f"Qwen{kind}VLVideoProcessor", {"patch_size": 4, "size": SIZE} | (stated or {}), given, VISION
    )


@pytest.mark.parametrize(("kind", "given", "count", "height", "width", "data", "grid", "indices", "fps"), RECORDED)
def test_frames_and_sizes_are_those_of_transformers(kind, given, count, height, width, data, grid, indices, fps):
    frames = random_video(1, count, width, height)
    found = processor(kind, **given).frames(video_of((frames, data) if data else frames, "v"), 1000, "v")
    assert (found.grid, found.indices) == (grid, indices)
    assert found.sampled_fps == pytest.approx(fps, rel=1e-12)
    assert found.pixels.shape == (grid[0] * grid[1] * grid[2], 3 * 2 * 4 * 4)


def test_patches_are_those_of_images_one_time_behind_the_other():
    frames = random_video(1, 3, 24, 16)
    pixels = processor().frames(video_of(frames, "v"), 1000, "v").pixels.reshape(2, 24, 3, 2, 16)
    images = image_processor_of("qwen2_vl")
    for number, (group, time) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        expected = images([frames[min(number, 2)]], return_tensors="np")["pixel_values"].reshape(24, 3, 2, 16)
        np.testing.assert_allclose(pixels[group, :, :, time], expected[:, :, 0], rtol=0, atol=1e-6)


def test_resized_pixels_do_not_depend_on_the_version_of_pillow():
    """Recorded from this code: fewer than 1 in 100 values differ from torchvision's, by 2 of 255 at most."""
    values = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    found = processor(stated=values).frames(video_of(random_video(1, 2, 30, 20), "v"), 1000, "v").pixels * 255
    assert hashlib.sha256(found.round().astype(np.uint8).tobytes()).hexdigest()[:16] == "a5c795360f9bc10e"


@pytest.mark.parametrize("kind", ["2", "3"])
def test_defaults_are_those_of_the_class(kind):
    """Read from its source, because it cannot be imported without torchvision."""
    spec = importlib.util.find_spec(f"transformers.models.qwen{kind}_vl.video_processing_qwen{kind}_vl")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("VideoProcessor")]
    constants = importlib.import_module("transformers.image_utils")
    names = {**vars(constants)}
    values = {
        target.id: eval(compile(ast.Expression(node.value), "source", "eval"), names)
        for node in found.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id not in ("valid_kwargs", "model_input_names")
    }
    values |= {"max_image_size": None, "max_duration": None}  # nothing reads them
    defaults = {"max_image_size": None, "max_duration": None, **DEFAULTS[found.name]}
    for name, value in values.items():
        assert defaults[name] == (list(value) if isinstance(value, (list, tuple)) else value), name


@pytest.mark.parametrize(
    ("kind", "stated", "error", "reason"),
    [
        ("2", {"gamma": 2}, "processor_key_unsupported", "gamma = 2, which transformers' Qwen2VLVideoProcessor"),
        ("3", {"min_pixels": 3136}, "processor_key_unsupported", "min_pixels = 3136"),
        ("2", {"patch_size": 5}, "model_malformed", "its patch_size is 5, and that of the encoder 4"),
        ("2", {"size": {"height": 3}}, "model_malformed", "its size has no shortest_edge"),
    ],
)
def test_files_that_are_not_understood_are_refused(kind, stated, error, reason):
    with pytest.raises(AiakqError, match=reason) as caught:
        processor(kind, stated)
    assert caught.value.id == error


def test_files_of_images_state_videos_too():
    processor(
        "2", {"min_pixels": 64, "max_pixels": 1024, "size": None, "image_processor_type": "x", "do_center_crop": False}
    )


def test_a_size_of_the_user_replaces_that_of_the_file():
    video = video_of(random_video(1, 2, 64, 64), "v")
    stated = {"min_pixels": 64, "max_pixels": 256}
    assert processor("2", stated).frames(video, 1000, "v").grid == (1, 4, 4)
    for given in ({"size": {"shortest_edge": 64, "longest_edge": 1024}}, {"max_pixels": 1024}):
        assert processor("2", stated, **given).frames(video, 1000, "v").grid == (1, 8, 8)


@pytest.mark.parametrize("given", [{"fps": 0}, {"fps": "2"}, {"num_frames": -1}, {"do_sample_frames": 1}])
def test_wrong_arguments_are_refused(given):
    with pytest.raises(AiakqError, match="--mm-processor-kwargs"):
        processor("3", **given)


@pytest.mark.parametrize(
    ("kind", "given", "frames", "data", "reason"),
    [
        ("2", {"do_sample_frames": True}, 8, {"fps": 1}, "it needs num_frames or fps"),
        ("2", {"do_sample_frames": True, "fps": 2}, 8, None, "the frames per second of the video have to be known"),
        ("2", {"do_sample_frames": True, "num_frames": 10}, 8, None, "10 frames are to be sampled from 8"),
        ("3", {"num_frames": 4}, 8, None, "num_frames and fps exclude each other"),
        ("2", {"do_resize": False}, 8, None, "without do_resize, sides have to be multiples of 8"),
        ("2", {}, 900, None, "it takes 1350 tokens, more than the 1000 of the encoder cache"),
    ],
)
def test_videos_that_the_processor_rejects(kind, given, frames, data, reason):
    video = random_video(1, frames, 24, 9)
    with pytest.raises(AiakqError, match=reason) as caught:
        processor(kind, **given).frames(video_of((video, data) if data else video, "v"), 1000, "v")
    assert caught.value.id == "media_refused"


def test_the_file_is_found_where_transformers_looks_for_it(tmp_path):
    assert stated_video_processor(str(tmp_path)) == {}
    for name, content in [
        ("preprocessor_config.json", {"a": 1}),
        ("video_preprocessor_config.json", {"a": 2}),
        ("processor_config.json", {"video_processor": {"a": 3}}),
    ]:
        (tmp_path / name).write_text(json.dumps(content))
        assert stated_video_processor(str(tmp_path))["a"] == content.get("a", 3)
