"""MultimodalConfig: limits of images, and which are refused."""

from __future__ import annotations

import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.config.multimodal import MultimodalConfig, media_limits
from aiakq.runtime.protocol.media import MediaLimits

RAW = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": {}, "image_token_id": 3}


@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, 999), ({"image": 0}, 0), ({"image": {"count": 3, "width": 9}, "video": 1}, 3), ({"audio": 2}, 999)],
)
def test_the_limit_of_images(given, limit):
    assert media_limits(given)["image"] == limit


def test_the_limit_of_audios():
    assert media_limits({"image": 1, "audio": {"count": 2}}) == {"image": 1, "video": 999, "audio": 2}


@pytest.mark.parametrize(
    "given", [{"image": -1}, {"image": "4"}, {"image": True}, {"images": 4}, {"image": 1000}, {"image": {"counts": 1}}]
)
def test_wrong_limits_are_refused(given):
    with pytest.raises(AiakqError, match="--limit-mm-per-prompt"):
        media_limits(given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["OtherForConditionalGeneration"]}, "those of Gemma3, Idefics3"),
        ({"image_token_id": None}, "no image_token_id"),
    ],
)
def test_images_that_are_not_computed_are_refused_by_name(changes, reason):
    config = MultimodalConfig.from_args(EngineArguments(model="m"), "folder", {**RAW, **changes})
    assert config is not None and reason in config.refusal


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ({}, {}),
        ({"architectures": ["WhisperForConditionalGeneration"]}, {}),
        ({"architectures": ["VoxtralForConditionalGeneration"], "text_config": {}, "audio_config": {}}, {}),
        ({**RAW, "architectures": ["OtherForConditionalGeneration"]}, {}),
        (RAW, {"language_model_only": True}),
        (RAW, {"limit_mm_per_prompt": {"image": 0}}),
    ],
)
@pytest.mark.parametrize(
    "given", [{"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {"num_frames": 4}}}], ids=str
)
def test_arguments_of_media_that_are_not_read_are_refused(raw, arguments, given):
    with pytest.raises(AiakqError, match="nothing for a model that reads no (images or )?videos"):
        MultimodalConfig.from_args(EngineArguments(model="m", **arguments, **given), "folder", raw)


def test_a_folder_of_media_has_to_exist(tmp_path):
    MultimodalConfig.from_args(EngineArguments(model="m", allowed_local_media_path=str(tmp_path)), "folder", RAW)
    with pytest.raises(AiakqError, match="--allowed-local-media-path is .* not a folder that exists"):
        MultimodalConfig.from_args(EngineArguments(model="m", allowed_local_media_path="/no/where"), "folder", RAW)


def test_a_limit_of_no_images_leaves_out_their_encoder():
    args = EngineArguments(model="m", limit_mm_per_prompt={"image": 0})
    config = MultimodalConfig.from_args(args, "folder", RAW)
    assert config is not None and config.refusal == "--limit-mm-per-prompt allows no images"


@pytest.mark.parametrize(
    ("limits", "kinds", "refused"),
    [
        ({}, ["image", "video"], {}),
        ({"image": 0}, ["video"], {"image": "--limit-mm-per-prompt allows no images"}),
        ({"video": 0, "audio": 0}, ["image"], {"video": "--limit-mm-per-prompt allows no videos"}),
    ],
)
def test_limits_of_kinds_that_one_encoder_reads(limits, kinds, refused):
    raw = {**RAW, "architectures": ["Qwen2VLForConditionalGeneration"], "video_token_id": 4}
    config = MultimodalConfig.from_args(EngineArguments(model="m", limit_mm_per_prompt=limits), "folder", raw)
    assert config is not None and not config.refusal and config.refusals == refused
    assert MediaLimits("", dict(config.max_items), 9, dict(config.refusals)).kinds == kinds


def test_an_encoder_that_reads_no_images_reads_no_videos():
    raw = {**RAW, "architectures": ["Qwen2VLForConditionalGeneration"], "video_token_id": 4, "image_token_id": None}
    config = MultimodalConfig.from_args(EngineArguments(model="m"), "folder", raw)
    assert config is not None and set(config.refusals.values()) == {"config.json has no image_token_id"}


def test_keys_of_the_language_model_beside_its_vision_config():
    raw = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "image_token_id": 3}
    raw |= {
        "hidden_size": 64,
        "quantization_config": {"bits": 4},
        "vision_config": {"depth": 2},
        "tie_word_embeddings": True,
    }
    config = MultimodalConfig.from_args(EngineArguments(model="m"), "folder", raw)
    assert config is not None and not config.refusal and config.grid(7) is not None
    assert config.raw["text_config"] == {"model_type": "qwen2_vl_text", "hidden_size": 64, "tie_word_embeddings": True}
    assert config.raw["quantization_config"] and config.raw["vision_config"] == {"depth": 2}


def test_a_draft_model_and_text_models():
    arguments = EngineArguments(model="m")
    config = MultimodalConfig.from_args(arguments, "folder", RAW, has_draft_model=True)
    assert config is not None and "draft tokens reads text only" in config.refusal
    config = MultimodalConfig.from_args(arguments, "folder", RAW)
    assert config is not None and not config.refusal
    assert MultimodalConfig.from_args(arguments, "folder", {"architectures": ["LlamaForCausalLM"]}) is None
