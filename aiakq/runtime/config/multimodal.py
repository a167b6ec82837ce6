"""MultimodalConfig: whether a checkpoint's images and videos are computed, and how. That of audio is in speech.py. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error
from aiakq.runtime.config.rope import GridRope
from aiakq.runtime.config.speech import GENERATION_KEYS as GENERATION_KEYS
from aiakq.runtime.config.speech import SpeechConfig as SpeechConfig
from aiakq.runtime.config.speech import transcribes_audio as transcribes_audio
from aiakq.runtime.config.text_part import with_text_config
from aiakq.runtime.config.video_reading import VideoReading
from aiakq.runtime.protocol.media import IMAGE_ARCHITECTURES, MAX_ITEMS

#: Tokens of images whose embeddings are kept at most; those of one prompt have to fit.
MAX_ENCODER_CACHE_TOKENS = 1 << 15
#: Architectures with M-RoPE -> fields of ``GridRope``.
_GRIDS: Mapping[str, tuple[tuple[int, int, int], bool]] = {
    "Qwen2VLForConditionalGeneration": ((16, 24, 24), False),
    "Qwen2_5_VLForConditionalGeneration": ((16, 24, 24), False),
    "Qwen3VLForConditionalGeneration": ((24, 20, 20), True),
    "Qwen3VLMoeForConditionalGeneration": ((24, 20, 20), True),
    "Qwen3_5ForConditionalGeneration": ((11, 11, 10), True),
    "Qwen3_5MoeForConditionalGeneration": ((11, 11, 10), True),
}
#: Architectures whose images are also added to the outputs of layers, as many as deepstack_visual_indexes has numbers
#: -> its default.
_DEEPSTACK: Mapping[str, tuple[int, ...]] = dict.fromkeys(
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), (8, 16, 24)
)


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig:
    """What a model reads besides text.

    architecture    that config.json names.
    folder          the model's.
    image_token_id  the token that stands for a part of an image.
    raw             config.json, with a ``text_config``.
    max_items       images per prompt.
    processor_kwargs  arguments of the processor of images.
    media_path      folder of images that file:// URLs may name; None for none.
    domains         hosts from which images are fetched; empty for every public one.
    refusal         why images and videos are refused; "" if they are read.
    max_videos      videos per prompt.
    video_token_id  the token that stands for a part of a video.
    video_reading   how files of videos are read.
    video_refusal   why videos are refused; "" if they are read.
    """

    architecture: str
    folder: str = ""
    image_token_id: int = -1
    raw: Mapping[str, Any] = field(default_factory=dict)
    max_items: int = MAX_ITEMS
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_path: str | None = None
    domains: tuple[str, ...] = ()
    refusal: str = ""
    max_videos: int = 0
    video_token_id: int = -1
    video_reading: VideoReading = VideoReading()
    video_refusal: str = ""

    @property
    def added_layers(self) -> int:
        """The number of layers, from the first on, to whose outputs images are added."""
        default = _DEEPSTACK.get(self.architecture)
        return 0 if default is None else len(self.raw["vision_config"].get("deepstack_visual_indexes", default))

    @property
    def whole_tokens(self) -> int:
        """The number of tokens of an image that attend to each other in both directions; 0 for none."""
        if self.architecture != "Gemma3ForConditionalGeneration":
            return 0
        stated = self.raw.get("mm_tokens_per_image")
        return stated if type(stated) is int and stated > 0 else 256

    def grid(self, rows: int) -> GridRope | None:
        """Return how up to ``rows`` tokens of images in a step are rotated; None if each has one position."""
        found = _GRIDS.get(self.architecture)
        return None if found is None else GridRope(rows, *found)

    @staticmethod
    def from_args(
        args: EngineArguments, folder: str, raw: Mapping[str, Any], has_draft_model: bool = False
    ) -> MultimodalConfig | None:
        """Return the settings of a multimodal checkpoint; None for a model of text. Raises ``bad_option``.

        folder           the model's.
        raw              config.json.
        has_draft_model  whether another model proposes draft tokens.
        """
        limits = args.limit_mm_per_prompt or {}
        max_items, max_videos = image_limit(limits), item_limit(limits, "video")
        reading = VideoReading.from_argument(args.media_io_kwargs)
        raw = with_text_config(raw)
        if not (isinstance(raw.get("text_config"), dict) and isinstance(raw.get("vision_config"), dict)):
            return None
        named = raw.get("architectures")
        architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
        token = raw.get("image_token_id", raw.get("image_token_index"))
        refusal = _refusal(args, architecture, has_draft_model)
        if not refusal and type(token) is not int:
            refusal = "config.json has no image_token_id"
        video_refusal, video_token = _video_refusal(architecture, max_videos), raw.get("video_token_id")
        if not video_refusal and type(video_token) is not int:
            video_refusal = "config.json has no video_token_id"
        if not refusal and not max_items and video_refusal:
            refusal = "--limit-mm-per-prompt allows none"
        return MultimodalConfig(
            architecture=architecture,
            folder=folder,
            image_token_id=token if type(token) is int else -1,
            raw=raw,
            max_items=max_items,
            processor_kwargs=args.mm_processor_kwargs or {},
            media_path=args.allowed_local_media_path,
            domains=tuple(args.allowed_media_domains or ()),
            refusal=refusal,
            max_videos=max_videos,
            video_token_id=video_token if type(video_token) is int else -1,
            video_reading=reading,
            video_refusal=video_refusal,
        )


def image_limit(given: Mapping[str, object]) -> int:
    """Return the images per prompt of --limit-mm-per-prompt. Raises ``bad_option``."""
    return item_limit(given, "image")


def item_limit(given: Mapping[str, object], wanted: str) -> int:
    """Return the items per prompt of the kind ``wanted`` of --limit-mm-per-prompt. Raises ``bad_option``.

    A limit may be an object with ``count``, as in vLLM.
    """
    found = MAX_ITEMS
    for kind, value in given.items():
        count = value.get("count", MAX_ITEMS) if isinstance(value, dict) else value
        if kind not in ("image", "video", "audio") or type(count) is not int or not 0 <= count <= MAX_ITEMS:
            raise error(
                "bad_option",
                option="--limit-mm-per-prompt",
                value=dict(given),
                expected=f'numbers up to {MAX_ITEMS} by kind, such as {{"image": 4}}',
                hint="",
            )
        found = count if kind == wanted else found
    return found


def _video_refusal(architecture: str, max_videos: int) -> str:
    """Return why videos of a checkpoint are refused, although its images are read; "" if they are."""
    if architecture not in _GRIDS:
        known = ", ".join(name.removesuffix("ForConditionalGeneration") for name in _GRIDS)
        return f"videos of {architecture:.64} are not computed; those of {known} are"
    return "" if max_videos else "--limit-mm-per-prompt allows no videos"


def _refusal(args: EngineArguments, architecture: str, has_draft_model: bool) -> str:
    """Return why images of a checkpoint are refused; "" if they are read."""
    if args.language_model_only:
        return "--language-model-only leaves out the encoder of images"
    if architecture not in IMAGE_ARCHITECTURES:
        known = ", ".join(name.removesuffix("ForConditionalGeneration") for name in IMAGE_ARCHITECTURES)
        return f"images of {architecture:.64} are not computed; those of {known} are"
    if args.model_impl == "transformers":
        return "with --model-impl transformers, only text is read"
    if has_draft_model:
        return "the model that proposes draft tokens reads text only"
    return ""
