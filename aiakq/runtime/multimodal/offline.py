"""Images of the prompts of ``LLM``: they are preprocessed in the calling process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.runtime.multimodal.images import as_rgb, decode_image, is_image
from aiakq.runtime.protocol.media import MediaItem, MediaLimits
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.multimodal.processor import ImagePreprocessor
    from aiakq.runtime.text.tokenizer import Tokenizer


class OfflineImages:
    """Adds images to prompts; the processor is loaded for the first."""

    def __init__(self, config: EngineConfig, limits: MediaLimits, tokenizer: Tokenizer) -> None:
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._preprocessor: ImagePreprocessor | None = None

    def add(self, text: str | None, token_ids: list[int], images: Sequence[object], place: str) -> Prompt:
        """Return the prompt with ``images``: images of Pillow, or the bytes of their files.

        Raises ``media_refused``, ``no_pillow``, ``no_tokenizer`` and ``model_malformed``.
        """
        self._limits.check_count(len(images), f"{place}.multi_modal_data.image")
        params = [f"{place}.multi_modal_data.image[{number}]" for number in range(len(images))]
        decoded = [_decoded(image, param) for image, param in zip(images, params, strict=True)]
        ids, media = self._loaded().expanded(token_ids, decoded, params, f"{place}.prompt")
        return Prompt(text, ids, media=media)

    def _loaded(self) -> ImagePreprocessor:
        if self._preprocessor is None:
            from aiakq.runtime.multimodal.processor import ImagePreprocessor

            assert self._config.multimodal is not None, "the limits allow images"
            if not self._tokenizer.has_text:
                raise error("no_tokenizer")
            folder = str(self._config.load.path)
            self._preprocessor = ImagePreprocessor.load(self._config.multimodal, folder, self._tokenizer)
        return self._preprocessor


def images_of(prompt: Mapping[str, Any], place: str) -> list[object]:
    """Return the images of a prompt of ``LLM.generate``.

    Raises ``invalid_type`` for anything that is no image, ``unsupported_parameter`` for other media.
    """
    data = prompt.get("multi_modal_data")
    if data is None:
        return []
    param = f"{place}.multi_modal_data"
    if not isinstance(data, Mapping):
        raise error("invalid_type", param=param, reason='a dict such as {"image": image} is expected')
    for name, value in data.items():
        if name != "image" and value:
            raise error("unsupported_parameter", param=f"{param}.{str(name)[:64]}", reason="only images are read")
    images = data.get("image")
    if images is None:
        return []
    listed = list(images) if isinstance(images, (list, tuple)) else [images]
    for number, image in enumerate(listed):
        if not is_image(image):
            reason = f"an image of Pillow is expected, not {type(image).__name__:.64}"
            raise error("invalid_type", param=f"{param}.image[{number}]", reason=reason)
    return listed


def check_not_truncated(media: Sequence[MediaItem], params: SamplingParams) -> None:
    """Raise ``unsupported_parameter`` for a prompt with images that would be truncated."""
    if media and params.truncate_prompt_tokens is not None:
        reason = "a prompt with images is not truncated"
        raise error("unsupported_parameter", param="truncate_prompt_tokens", reason=reason)


def _decoded(image: Any, param: str) -> Any:
    return decode_image(image, param) if isinstance(image, bytes) else as_rgb(image, param)
