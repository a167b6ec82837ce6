"""Media of the prompts of ``LLM``: they are preprocessed in the calling process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.runtime.multimodal.audio_files import samples_of
from aiakq.runtime.multimodal.images import as_rgb, is_image
from aiakq.runtime.multimodal.loading import load_preprocessor
from aiakq.runtime.multimodal.urls import MediaUrls
from aiakq.runtime.multimodal.videos import listed_videos, video_of
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, MediaLimits
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.media_parts import MediaSource, check_read
from aiakq.runtime.text.message_parts import media_in

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor
    from aiakq.runtime.text.tokenizer import Tokenizer


class OfflineMedia:
    """Adds media to prompts; the processor is loaded for the first, or at once if the user gave arguments for it."""

    def __init__(self, config: EngineConfig, limits: MediaLimits, tokenizer: Tokenizer) -> None:
        """Raises ``bad_option`` for arguments that the processor does not take."""
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._preprocessor: MediaPreprocessor | None = None
        self._urls = (
            MediaUrls(config.multimodal.media_path, config.multimodal.domains) if config.multimodal else MediaUrls()
        )
        if config.multimodal and config.multimodal.processor_kwargs and not limits.refusal and tokenizer.has_text:
            self.loaded()

    def of(self, prompt: Mapping[str, Any], place: str) -> list[MediaSource]:
        """Return the media of a prompt of ``LLM.generate``.

        Raises ``invalid_type`` for anything that is none, ``unsupported_parameter`` for other kinds than the model's.
        """
        return media_of(prompt, place, self._limits)

    def add(self, text: str | None, token_ids: list[int], media: Sequence[MediaSource], place: str) -> Prompt:
        """Return the prompt with ``media``; ``place`` is its name in errors.

        Raises ``unsupported_parameter``, ``media_refused``, ``no_pillow``, ``no_soundfile``, ``no_tokenizer`` and
        ``model_malformed``.
        """
        self._limits.check_counts([each.kind for each in media], [each.param for each in media])
        read = [self._read(each) for each in media]
        ids, items = self.loaded().expanded(token_ids, read, [each.param for each in media], place)
        return Prompt(text, ids, media=items)

    def in_conversation(self, messages: list[dict[str, object]]) -> tuple[list[MediaSource], dict[str, str]]:
        """Return where the media of a conversation come from, and their placeholders by kind where a prompt is text.

        Raises as ``add``, and what ``MediaPart.source`` raises.
        """
        media = media_in(messages)
        check_read(media, self._limits.kind, self._limits.refusal)
        sources = [each.source() for each in media]
        self._limits.check_counts([each.kind for each in sources], [each.param for each in sources])
        return sources, self.loaded().placeholder_texts if media else {}

    def _read(self, source: MediaSource) -> Any:
        if source.kind == "video":
            is_url = source.value is None
            return self._urls.read_video(source.url, source.param) if is_url else video_of(source.value, source.param)
        if source.value is None:
            return self._urls.read(source.url, source.param)
        if self._limits.kind == "audio":
            return samples_of(source.value, source.param)
        if not is_image(source.value):
            reason = f"an image of Pillow is expected, not {type(source.value).__name__:.64}"
            raise error("invalid_type", param=source.param, reason=reason)
        return as_rgb(source.value, source.param)

    def loaded(self) -> MediaPreprocessor:
        if self._preprocessor is None:
            assert self._config.multimodal is not None, "the limits allow media"
            if not self._tokenizer.has_text:
                raise error("no_tokenizer")
            self._preprocessor = load_preprocessor(self._config.multimodal, self._tokenizer)
        return self._preprocessor


def media_of(prompt: Mapping[str, Any], place: str, limits: MediaLimits) -> list[MediaSource]:
    """Return the media of a prompt of ``LLM.generate``; see ``OfflineMedia.of``."""
    data, kind = prompt.get("multi_modal_data"), limits.kind
    if data is None:
        return []
    param = f"{place}.multi_modal_data"
    if not isinstance(data, Mapping):
        raise error("invalid_type", param=param, reason=f'a dict such as {{"{kind}": {kind}}} is expected')
    kinds: tuple[MediaKind, ...] = ("image", "video") if kind == "image" else (kind,)
    for name, value in data.items():
        if name not in kinds and value is not None and (not hasattr(value, "__len__") or len(value)):
            read = "text" if limits.refusal else " and ".join(PLURALS[each] for each in kinds)
            reason = f"only {read} {'is' if limits.refusal else 'are'} read"
            raise error("unsupported_parameter", param=f"{param}.{str(name)[:64]}", reason=reason)
    sources = []
    for each in kinds:
        media = data.get(each)
        listed = [] if media is None else _listed(media, each)
        sources += [MediaSource(f"{param}.{each}[{n}]", value=value, kind=each) for n, value in enumerate(listed)]
    return sources


def _listed(media: Any, kind: MediaKind) -> list[Any]:
    """Return one or several items of a kind as a list."""
    if kind == "video":
        return listed_videos(media)
    return list(media) if _is_several(media, kind) else [media]


def _is_several(media: Any, kind: MediaKind) -> bool:
    """Whether ``media`` are several items: an audio may be a pair of samples and their rate, or a list of samples."""
    if kind == "image":
        return isinstance(media, (list, tuple))
    return isinstance(media, list) and not (media and isinstance(media[0], (int, float)))


def check_not_truncated(media: Sequence[MediaItem], params: SamplingParams) -> None:
    """Raise ``unsupported_parameter`` for a prompt with media that would be truncated."""
    if media and params.truncate_prompt_tokens is not None:
        reason = f"a prompt with {PLURALS[media[0].kind]} is not truncated"
        raise error("unsupported_parameter", param="truncate_prompt_tokens", reason=reason)
