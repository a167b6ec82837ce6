"""MultimodalConfig: whether a checkpoint's images, videos or audios are computed, and how. No torch.

That of models that transcribe audio is in speech.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
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
from aiakq.runtime.protocol.media import ARCHITECTURES, MAX_ITEMS, PLURALS, MediaKind

#: Tokens of media whose embeddings are kept at most; those of one prompt have to fit.
MAX_ENCODER_CACHE_TOKENS = 1 << 15
#: Kind of media -> part of config.json with its encoder, and names of the token that stands for a part of an item.
_KEYS: Mapping[MediaKind, tuple[str, tuple[str, str]]] = {
    "image": ("vision_config", ("image_token_id", "image_token_index")),
    "video": ("vision_config", ("video_token_id", "video_token_index")),
    "audio": ("audio_config", ("audio_token_id", "audio_token_index")),
}
#: Keys of vLLM's limits that say how large items are when memory is measured. Here their cache has a fixed size.
_HINTS = ("width", "height", "num_frames", "length")
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
    kind            the first of those that its encoder reads: images, to which videos may come, or audio.
    folder          the model's.
    token_ids       kind -> the token that stands for a part of an item.
    raw             config.json, with a ``text_config``.
    max_items       kind -> items per prompt.
    processor_kwargs  arguments of the processors of images and videos.
    video_reading   how files of videos are read.
    media_path      folder of files that file:// URLs may name; None for none.
    domains         hosts from which media are fetched; empty for every public one.
    refusals        kind that its encoder could read -> why its items are refused, if they are.
    """

    architecture: str
    kind: MediaKind = "image"
    folder: str = ""
    token_ids: Mapping[MediaKind, int] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)
    max_items: Mapping[MediaKind, int] = field(default_factory=dict)
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    video_reading: VideoReading = VideoReading()
    media_path: str | None = None
    domains: tuple[str, ...] = ()
    refusals: Mapping[MediaKind, str] = field(default_factory=dict)

    @property
    def refusal(self) -> str:
        """Why no media are read; "" if those of a kind are."""
        return "" if self.max_items.keys() - self.refusals.keys() else self.refusals.get(self.kind, "")

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
        path = args.allowed_local_media_path
        if path is not None and not os.path.isdir(path):
            fields = {"option": "--allowed-local-media-path", "value": path, "expected": "a folder that exists"}
            raise error("bad_option", **fields, hint="")
        limits, reading = media_limits(args.limit_mm_per_prompt or {}), VideoReading.from_argument(args.media_io_kwargs)
        raw = with_text_config(raw)
        parts = [part for part, _ in _KEYS.values() if isinstance(raw.get(part), dict)]
        if not (isinstance(raw.get("text_config"), dict) and parts):
            _check_effects(args, ())
            return None
        kinds = [kind for kind, (part, _) in _KEYS.items() if part == parts[0]]
        named = raw.get("architectures")
        architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
        _check_effects(args, [kind for kind in kinds if limits[kind] and architecture in ARCHITECTURES[kind]])
        tokens = {kind: _token_id(raw, kind) for kind in kinds}
        return MultimodalConfig(
            architecture=architecture,
            kind=kinds[0],
            folder=folder,
            token_ids={kind: token for kind, token in tokens.items() if token is not None},
            raw=raw,
            max_items={kind: limits[kind] for kind in kinds},
            processor_kwargs=args.mm_processor_kwargs or {},
            video_reading=reading,
            media_path=path,
            domains=tuple(args.allowed_media_domains or ()),
            refusals=_refusals(args, architecture, tokens, limits, has_draft_model),
        )


def media_limits(given: Mapping[str, object]) -> dict[MediaKind, int]:
    """Return the items of each kind per prompt of --limit-mm-per-prompt. Raises ``bad_option``.

    A limit may be an object with ``count``, as in vLLM.
    """
    found: dict[MediaKind, int] = dict.fromkeys(PLURALS, MAX_ITEMS)
    for kind, value in given.items():
        unknown = set(value) - {"count", *_HINTS} if isinstance(value, dict) else set()
        count = value.get("count", MAX_ITEMS) if isinstance(value, dict) else value
        if unknown or kind not in found or type(count) is not int or not 0 <= count <= MAX_ITEMS:
            raise error(
                "bad_option",
                option="--limit-mm-per-prompt",
                value=dict(given),
                expected=f'numbers up to {MAX_ITEMS} by kind, such as {{"image": 4}}',
                hint="",
            )
        found[kind] = count
    return found


def _check_effects(args: EngineArguments, kinds: Collection[MediaKind]) -> None:
    """Raise ``bad_option`` for arguments of media that have no effect on a model, which reads ``kinds``."""
    options: Mapping[str, tuple[object, tuple[MediaKind, ...]]] = {
        "--mm-processor-kwargs": (args.mm_processor_kwargs, ("image", "video")),
        "--media-io-kwargs": (args.media_io_kwargs, ("video",)),
    }
    for option, (value, read) in options.items():
        if value and (args.language_model_only or not set(read) & set(kinds)):
            expected = f"nothing for a model that reads no {' or '.join(PLURALS[kind] for kind in read)}"
            raise error("bad_option", option=option, value=value, expected=expected, hint="Leave it out.")


def _token_id(raw: Mapping[str, Any], kind: MediaKind) -> int | None:
    """Return the token of config.json that stands for a part of an item; None without one."""
    name, other_name = _KEYS[kind][1]
    token = raw.get(name, raw.get(other_name))
    return token if type(token) is int else None


def _refusals(
    args: EngineArguments,
    architecture: str,
    tokens: Mapping[MediaKind, int | None],
    limits: Mapping[MediaKind, int],
    has_draft_model: bool,
) -> dict[MediaKind, str]:
    """Return the kinds of ``tokens``, which an encoder could read, whose items are refused, and why.

    Nothing is read by an encoder that does not read the first of them.
    """
    found: dict[MediaKind, str] = {}
    first = next(iter(tokens))
    for kind, token in tokens.items():
        refusal = found.get(first) or _refusal(args, kind, architecture, has_draft_model)
        if not refusal and token is None:
            refusal = f"config.json has no {_KEYS[kind][1][0]}"
        if refusal:
            found[kind] = refusal
    return {kind: f"--limit-mm-per-prompt allows no {PLURALS[kind]}" for kind in tokens if not limits[kind]} | found


def _refusal(args: EngineArguments, kind: MediaKind, architecture: str, has_draft_model: bool) -> str:
    """Return why media of a kind are refused; "" if they are read."""
    if args.language_model_only:
        return f"--language-model-only leaves out the encoder of {PLURALS[kind]}"
    if architecture not in ARCHITECTURES[kind]:
        known = ", ".join(name.removesuffix("ForConditionalGeneration") for name in ARCHITECTURES[kind])
        return f"{PLURALS[kind]} of {architecture:.64} are not computed; those of {known} are"
    if args.model_impl == "transformers":
        return "with --model-impl transformers, only text is read"
    if has_draft_model:
        return "the model that proposes draft tokens reads text only"
    return ""
