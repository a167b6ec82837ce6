"""MultimodalConfig: whether a checkpoint's images and videos, or audios are computed, and how. No torch.

That of models that transcribe audio is in speech.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error
from aiakq.runtime.config.rope import GridRope
from aiakq.runtime.config.speech import GENERATION_KEYS as GENERATION_KEYS
from aiakq.runtime.config.speech import SpectrogramConfig
from aiakq.runtime.config.speech import SpeechConfig as SpeechConfig
from aiakq.runtime.config.speech import transcribes_audio as transcribes_audio
from aiakq.runtime.config.text_part import with_text_config
from aiakq.runtime.config.video_reading import VideoReading
from aiakq.runtime.protocol.media import AUDIO_ARCHITECTURES, IMAGE_ARCHITECTURES, MAX_ITEMS, PLURALS, MediaKind

#: Tokens of media whose embeddings are kept at most; those of one prompt have to fit.
MAX_ENCODER_CACHE_TOKENS = 1 << 15
#: Kind of media -> part of config.json with its encoder, and names of the token that stands for a part of an item.
_KEYS: Mapping[MediaKind, tuple[str, tuple[str, str]]] = {
    "image": ("vision_config", ("image_token_id", "image_token_index")),
    "audio": ("audio_config", ("audio_token_id", "audio_token_index")),
}
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
    kind            images or audio.
    folder          the model's.
    token_id        the token that stands for a part of an item.
    raw             config.json, with a ``text_config``.
    max_items       items per prompt.
    processor_kwargs  arguments of the processor of images.
    media_path      folder of files that file:// URLs may name; None for none.
    domains         hosts from which media are fetched; empty for every public one.
    refusal         why they are refused; "" if they are read.
    max_videos      videos per prompt, beside images.
    video_token_id  the token that stands for a part of a video.
    video_reading   how files of videos are read.
    video_refusal   why videos are refused; "" if they are read.
    """

    architecture: str
    kind: MediaKind = "image"
    folder: str = ""
    token_id: int = -1
    raw: Mapping[str, Any] = field(default_factory=dict)
    max_items: int = MAX_ITEMS
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_path: str | None = None
    domains: tuple[str, ...] = ()
    refusal: str = ""
    max_videos: int = 0
    video_token_id: int = -1
    video_reading: VideoReading = VideoReading()
    video_refusal: str = "videos are not read"

    @property
    def part(self) -> str:
        """The key of config.json with the config of the encoder."""
        return _KEYS[self.kind][0]

    @property
    def spectrogram(self) -> SpectrogramConfig:
        """What an encoder of audio reads."""
        return SpectrogramConfig.of(self.folder, self.raw[self.part], num_bins=128)

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

        Of a model with encoders of both, it is the one of images.

        folder           the model's.
        raw              config.json.
        has_draft_model  whether another model proposes draft tokens.
        """
        limits, reading = media_limits(args.limit_mm_per_prompt or {}), VideoReading.from_argument(args.media_io_kwargs)
        raw = with_text_config(raw)
        kinds = [kind for kind in _KEYS if isinstance(raw.get(_KEYS[kind][0]), dict)]
        if not (isinstance(raw.get("text_config"), dict) and kinds):
            return None
        kind = kinds[0]
        if kind == "audio" and args.mm_processor_kwargs:
            expected = "nothing for a model that reads audio, whose files say how"
            given = {"option": "--mm-processor-kwargs", "value": args.mm_processor_kwargs, "expected": expected}
            raise error("bad_option", **given, hint="Leave it out.")
        named = raw.get("architectures")
        architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
        name, other_name = _KEYS[kind][1]
        token = raw.get(name, raw.get(other_name))
        refusal = _refusal(args, kind, architecture, has_draft_model)
        if not refusal and type(token) is not int:
            refusal = f"config.json has no {name}"
        video_refusal, video_token = _video_refusal(architecture, limits["video"]), raw.get("video_token_id")
        if not video_refusal and type(video_token) is not int:
            video_refusal = "config.json has no video_token_id"
        if not refusal and not limits[kind] and video_refusal:
            refusal = "--limit-mm-per-prompt allows none"
        return MultimodalConfig(
            architecture=architecture,
            kind=kind,
            folder=folder,
            token_id=token if type(token) is int else -1,
            raw=raw,
            max_items=limits[kind],
            processor_kwargs=args.mm_processor_kwargs or {},
            media_path=args.allowed_local_media_path,
            domains=tuple(args.allowed_media_domains or ()),
            refusal=refusal,
            max_videos=limits["video"],
            video_token_id=video_token if type(video_token) is int else -1,
            video_reading=reading,
            video_refusal=video_refusal,
        )


def media_limits(given: Mapping[str, object]) -> dict[str, int]:
    """Return the items of each kind per prompt of --limit-mm-per-prompt. Raises ``bad_option``.

    A limit may be an object with ``count``, as in vLLM.
    """
    found: dict[str, int] = dict.fromkeys(PLURALS, MAX_ITEMS)
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
        found[kind] = count
    return found


def _video_refusal(architecture: str, max_videos: int) -> str:
    """Return why videos of a checkpoint are refused, although its images are read; "" if they are."""
    if architecture not in _GRIDS:
        known = ", ".join(name.removesuffix("ForConditionalGeneration") for name in _GRIDS)
        return f"videos of {architecture:.64} are not computed; those of {known} are"
    return "" if max_videos else "--limit-mm-per-prompt allows no videos"


def _refusal(args: EngineArguments, kind: MediaKind, architecture: str, has_draft_model: bool) -> str:
    """Return why media of a checkpoint are refused; "" if they are read."""
    if args.language_model_only:
        return f"--language-model-only leaves out the encoder of {PLURALS[kind]}"
    listed = IMAGE_ARCHITECTURES if kind == "image" else AUDIO_ARCHITECTURES
    if architecture not in listed:
        known = ", ".join(name.removesuffix("ForConditionalGeneration") for name in listed)
        return f"{PLURALS[kind]} of {architecture:.64} are not computed; those of {known} are"
    if args.model_impl == "transformers":
        return "with --model-impl transformers, only text is read"
    if has_draft_model:
        return "the model that proposes draft tokens reads text only"
    return ""
