"""Media of the prompts of ``LLM``: they are preprocessed in the calling process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.runtime.multimodal.audio_files import samples_of
from aiakq.runtime.multimodal.images import as_rgb, is_image
from aiakq.runtime.multimodal.loading import MediaPreprocessors
from aiakq.runtime.multimodal.preprocessor import MediaInput
from aiakq.runtime.multimodal.urls import MediaUrls
from aiakq.runtime.multimodal.videos import listed_videos, video_of
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, MediaLimits, MediaSettings, named_kinds
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.media_parts import MediaSource, check_read
from aiakq.runtime.text.message_parts import media_in

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


class OfflineMedia:
    """Adds media to prompts; the processor is loaded for the first, or at once if the user gave arguments for it."""

    def __init__(self, config: EngineConfig, limits: MediaLimits, tokenizer: Tokenizer) -> None:
        """Raises ``bad_option`` for arguments that the processor does not take."""
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._loaded: MediaPreprocessors | None = None
        self._urls = (
            MediaUrls(config.multimodal.media_path, config.multimodal.domains) if config.multimodal else MediaUrls()
        )
        if config.multimodal and config.multimodal.processor_kwargs and not limits.refusal and tokenizer.has_text:
            self.loaded()

    def of(self, prompt: Mapping[str, Any], place: str) -> list[MediaSource]:
        """Return the media of a prompt of ``LLM.generate``.

        Raises ``invalid_type`` for anything that is none, ``unsupported_parameter`` for kinds that are not read.
        """
        return media_of(prompt, place, self._limits)

    def add(
        self,
        text: str | None,
        token_ids: list[int],
        media: Sequence[MediaSource],
        place: str,
        processor_kwargs: dict[str, object] | None = None,
    ) -> Prompt:
        """Return the prompt with ``media``; ``place`` is its name in errors.

        processor_kwargs  arguments of the model's processors, in addition to those of the engine.

        Raises ``unsupported_parameter``, ``value_out_of_range``, ``media_refused``, ``no_pillow``, ``no_soundfile``,
        ``no_tokenizer`` and ``model_malformed``.
        """
        self._limits.check_counts((each.kind, each.param) for each in media)
        settings = MediaSettings(processor_kwargs or {})
        self._limits.check_settings(settings)
        read = [MediaInput(each.kind, self._read(each), each.param) for each in media]
        ids, items = self.loaded().of(settings).expanded(token_ids, read, place)
        return Prompt(text, ids, media=items)

    def in_conversation(self, messages: list[dict[str, object]]) -> tuple[list[MediaSource], dict[MediaKind, str]]:
        """Return where the media of a conversation come from, and their placeholders where a prompt is text, by kind.

        Raises as ``add``, and what ``MediaPart.source`` raises.
        """
        media = media_in(messages)
        check_read(media, self._limits)
        sources = [each.source() for each in media]
        self._limits.check_counts((each.kind, each.param) for each in sources)
        return sources, self.loaded().default.placeholders if media else {}

    def _read(self, source: MediaSource) -> Any:
        if source.value is None and source.kind == "video":
            return self._urls.read_video(source.url, source.param)
        if source.value is None:
            return self._urls.read(source.url, source.param)
        if source.kind == "video":
            return video_of(source.value, source.param)
        if source.kind == "audio":
            return samples_of(source.value, source.param)
        if not is_image(source.value):
            reason = f"an image of Pillow is expected, not {type(source.value).__name__:.64}"
            raise error("invalid_type", param=source.param, reason=reason)
        return as_rgb(source.value, source.param)

    def loaded(self) -> MediaPreprocessors:
        if self._loaded is None:
            assert self._config.multimodal is not None, "the limits allow media"
            if not self._tokenizer.has_text:
                raise error("no_tokenizer")
            self._loaded = MediaPreprocessors(self._config.multimodal, self._tokenizer)
        return self._loaded


def media_of(prompt: Mapping[str, Any], place: str, limits: MediaLimits) -> list[MediaSource]:
    """Return the media of a prompt of ``LLM.generate``; see ``OfflineMedia.of``."""
    data = prompt.get("multi_modal_data")
    if data is None:
        return []
    param = f"{place}.multi_modal_data"
    kinds = list(limits.max_items) or ["image"]
    if not isinstance(data, Mapping):
        raise error("invalid_type", param=param, reason=f'a dict such as {{"{kinds[0]}": {kinds[0]}}} is expected')
    for name, value in data.items():
        if name not in PLURALS and _is_given(value):
            reason = f"media are {named_kinds(PLURALS)}"
            raise error("unsupported_parameter", param=f"{param}.{str(name)[:64]}", reason=reason)
    return [
        MediaSource(kind, f"{param}.{kind}[{number}]", value=each)
        for kind in PLURALS
        if kind in limits.kinds or _is_given(data.get(kind))
        for number, each in enumerate(_listed(data.get(kind), kind))
    ]


def _is_given(value: Any) -> bool:
    """Whether a value of ``multi_modal_data`` is something: neither None nor an empty list."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _listed(media: Any, kind: MediaKind) -> list[Any]:
    """Return ``media``, None or one or several items, as a list: an audio may be a pair of samples and their rate, or a
    list of samples, and a video a list of frames.
    """
    if media is None:
        return []
    if kind == "video":
        return listed_videos(media)
    is_one = isinstance(media, tuple) or (isinstance(media, list) and media and isinstance(media[0], Real))
    is_several = isinstance(media, (list, tuple)) and not (kind == "audio" and is_one)
    return list(media) if is_several else [media]


def check_not_truncated(media: Sequence[MediaItem], params: SamplingParams) -> None:
    """Raise ``unsupported_parameter`` for a prompt with media that would be truncated."""
    if media and params.truncate_prompt_tokens is not None:
        reason = f"a prompt with {named_kinds(item.kind for item in media)} is not truncated"
        raise error("unsupported_parameter", param="truncate_prompt_tokens", reason=reason)
