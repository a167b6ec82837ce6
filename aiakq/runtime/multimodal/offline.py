"""Images and videos of the prompts of ``LLM``: they are preprocessed in the calling process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.runtime.multimodal.images import as_rgb, is_image
from aiakq.runtime.multimodal.urls import ImageUrls
from aiakq.runtime.multimodal.videos import listed_videos, video_of
from aiakq.runtime.protocol.media import MediaItem, MediaLimits
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.image_parts import ImageSource
from aiakq.runtime.text.message_parts import images_in

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.multimodal.processor import ImagePreprocessor
    from aiakq.runtime.text.tokenizer import Tokenizer


class OfflineImages:
    """Adds images to prompts; the processor is loaded for the first, or at once if the user gave arguments for it."""

    def __init__(self, config: EngineConfig, limits: MediaLimits, tokenizer: Tokenizer) -> None:
        """Raises ``bad_option`` for arguments that the processor does not take."""
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._preprocessor: ImagePreprocessor | None = None
        self._urls = (
            ImageUrls(config.multimodal.media_path, config.multimodal.domains) if config.multimodal else ImageUrls()
        )
        if config.multimodal and config.multimodal.processor_kwargs and not limits.refusal and tokenizer.has_text:
            self.loaded()

    def add(self, text: str | None, token_ids: list[int], images: Sequence[ImageSource], place: str) -> Prompt:
        """Return the prompt with ``images``; ``place`` is its name in errors.

        Raises ``unsupported_parameter``, ``media_refused``, ``no_pillow``, ``no_tokenizer`` and ``model_malformed``.
        """
        check_counts(self._limits, images)
        rgb = [self._read(image) for image in images]
        ids, media = self.loaded().expanded(token_ids, rgb, [image.param for image in images], place)
        return Prompt(text, ids, media=media)

    def in_conversation(self, messages: list[dict[str, object]]) -> tuple[list[ImageSource], dict[str, str]]:
        """Return where the images and videos of a conversation come from, and their placeholders in prompts, by kind.

        Raises as ``add``, and what ``ImagePart.source`` raises.
        """
        images = images_in(messages)
        if images and self._limits.refusal:
            raise images[0].refused(self._limits.refusal)
        sources = [image.source() for image in images]
        check_counts(self._limits, sources)
        return sources, self.loaded().placeholders if images else {}

    def _read(self, source: ImageSource) -> Any:
        if source.is_video:
            is_url = source.image is None
            return self._urls.read_video(source.url, source.param) if is_url else video_of(source.image, source.param)
        if source.image is None:
            return self._urls.read(source.url, source.param)
        if not is_image(source.image):
            reason = f"an image of Pillow is expected, not {type(source.image).__name__:.64}"
            raise error("invalid_type", param=source.param, reason=reason)
        return as_rgb(source.image, source.param)

    def loaded(self) -> ImagePreprocessor:
        if self._preprocessor is None:
            from aiakq.runtime.multimodal.processor import ImagePreprocessor

            assert self._config.multimodal is not None, "the limits allow images"
            if not self._tokenizer.has_text:
                raise error("no_tokenizer")
            self._preprocessor = ImagePreprocessor.load(self._config.multimodal, self._tokenizer)
        return self._preprocessor


def images_of(prompt: Mapping[str, Any], place: str) -> list[ImageSource]:
    """Return the images and videos of a prompt of ``LLM.generate``.

    Raises ``invalid_type`` for anything that is no image, ``unsupported_parameter`` for other media.
    """
    data = prompt.get("multi_modal_data")
    if data is None:
        return []
    param = f"{place}.multi_modal_data"
    if not isinstance(data, Mapping):
        raise error("invalid_type", param=param, reason='a dict such as {"image": image} is expected')
    for name, value in data.items():
        if name not in ("image", "video") and value:
            reason = "only images and videos are read"
            raise error("unsupported_parameter", param=f"{param}.{str(name)[:64]}", reason=reason)
    images, videos = data.get("image"), data.get("video")
    listed = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
    sources = [ImageSource(f"{param}.image[{number}]", image=image) for number, image in enumerate(listed)]
    for number, video in enumerate([] if videos is None else listed_videos(videos)):
        sources.append(ImageSource(f"{param}.video[{number}]", image=video, is_video=True))
    return sources


def check_counts(limits: MediaLimits, sources: Sequence[ImageSource]) -> None:
    """Raise as ``MediaLimits.check_count`` and ``check_videos`` for the images and videos of a prompt."""
    videos = [source for source in sources if source.is_video]
    images = [source for source in sources if not source.is_video]
    if images:
        limits.check_count(len(images), images[-1].param)
    if videos:
        limits.check_videos(len(videos), videos[-1].param)


def check_not_truncated(media: Sequence[MediaItem], params: SamplingParams) -> None:
    """Raise ``unsupported_parameter`` for a prompt with images that would be truncated."""
    if media and params.truncate_prompt_tokens is not None:
        reason = "a prompt with images is not truncated"
        raise error("unsupported_parameter", param="truncate_prompt_tokens", reason=reason)
