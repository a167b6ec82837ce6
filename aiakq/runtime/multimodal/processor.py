"""ImagePreprocessor: images and the tokens of a prompt become ``MediaItem``s. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.multimodal.config_keys import TOKENS, check_processor_keys, processor_config
from aiakq.runtime.multimodal.families import image_text
from aiakq.runtime.multimodal.images import decode_image, refused
from aiakq.runtime.protocol.media import MediaItem, TensorRecord, media_key

if TYPE_CHECKING:
    from PIL.Image import Image

    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer

#: NumPy's names of dtypes -> those that ``TensorRecord`` has.
_DTYPES = {"float32": "float32", "float64": "float32", "int64": "int64", "int32": "int64", "bool": "bool"}


class ImagePreprocessor:
    """Preprocesses images with transformers' processor of the model, one at a time.

    Each image is processed alone: what its tensors are does not depend on the others of the prompt.
    """

    def __init__(self, config: MultimodalConfig, processor: Any, tokenizer: Tokenizer) -> None:
        """Raises ``model_incomplete`` if the tokenizer lacks the token of images."""
        self._image_token_id = config.image_token_id
        [self.image_token] = tokenizer.raw_tokens([config.image_token_id])
        self._encode: Callable[[str, bool], list[int]] = tokenizer.encode
        self._processor = processor
        named = _special(tokenizer, config.folder)
        self._text = image_text(config.architecture, _completed(config.raw), self.image_token, named)
        self._options = {**config.processor_kwargs, **self._text.options}

    @classmethod
    def load(cls, config: MultimodalConfig, tokenizer: Tokenizer) -> ImagePreprocessor:
        """Load the image processor of a model. Raises ``no_pillow``, ``unsupported_parameter``,
        ``processor_key_unsupported`` and ``model_malformed``.
        """
        import transformers

        folder = config.folder
        if tokenizer.encodes_chats:
            reason = "mistral-common's tokenizer is given text only; use --tokenizer-mode hf"
            raise error("unsupported_parameter", param="image", reason=reason)

        try:
            import PIL  # noqa: F401
        except ImportError:
            raise error("no_pillow") from None
        # One implementation everywhere: torchvision's resizes to slightly other pixels.
        pinned = {"backend": "pil"} if int(transformers.__version__.partition(".")[0]) >= 5 else {"use_fast": False}
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, **pinned)
            check_processor_keys(processor, folder)
            return cls(config, processor, tokenizer)
        except (AiakqError, MemoryError):
            raise
        except Exception as failure:
            file = f"the image processor in '{folder}'"
            raise error("model_malformed", file=file, reason=first_line(failure)[:200]) from failure

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[Image | bytes], params: Sequence[str], prompt: str = "prompt"
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with each placeholder replaced by the tokens of its image, and the images.

        images  images in RGB, or their files.
        params  names of the images in errors.
        prompt  that of the prompt.

        Raises ``media_refused`` for an image that is damaged or too large or that the processor rejects, and unless
        there are as many placeholders.
        """
        found = token_ids.count(self._image_token_id)
        if found != len(images):
            reason = f"there are {len(images)} images for its {found} placeholders {self.image_token}"
            raise refused(prompt, reason)
        ids: list[int] = []
        items = []
        begin = 0
        for image, param in zip(images, params, strict=True):
            at = token_ids.index(self._image_token_id, begin)
            ids += token_ids[begin:at]
            decoded = decode_image(image, param) if isinstance(image, bytes) else image
            own, tensors, grid = self._processed(decoded, param)
            items.append(MediaItem("image", media_key("image", tensors), self._places(own, len(ids)), tensors, grid))
            ids += own
            begin = at + 1
        return ids + list(token_ids[begin:]), tuple(items)

    def _processed(self, image: Image, param: str) -> tuple[list[int], dict[str, TensorRecord], tuple[int, int] | None]:
        """Return the tokens, the tensors and the grid of one image."""
        try:
            processed = self._processor([image], return_tensors="np", **self._options)
            text, grid = self._text.text(processed), self._text.grid(processed)
        except MemoryError:
            raise
        except Exception as failure:
            width, height = image.size
            reason = f"the model's image processor rejects it ({first_line(failure).rstrip('.')[:200]})"
            raise refused(param, f"{reason}; it has {width} x {height} pixels") from failure
        tensors = {name: _record(processed[name]) for name in self._text.tensors if name in processed}
        return self._encode(text, False), tensors, grid

    def _places(self, ids: list[int], start: int) -> list[tuple[int, int]]:
        """Return the runs of placeholders in the tokens of an image, which are at ``start`` of the prompt."""
        places: list[tuple[int, int]] = []
        for number, token in enumerate(ids, start):
            if token != self._image_token_id:
                continue
            if places and sum(places[-1]) == number:
                places[-1] = (places[-1][0], places[-1][1] + 1)
            else:
                places.append((number, 1))
        return places


def _record(array: Any) -> TensorRecord:
    found = np.asarray(array)
    dtype = _DTYPES[found.dtype.name]
    converted = np.ascontiguousarray(found.astype(dtype, copy=False))
    return TensorRecord(dtype, list(converted.shape), converted.tobytes())


def _completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of transformers' class, which files leave out."""
    from transformers import CONFIG_MAPPING

    completed: dict[str, Any] = CONFIG_MAPPING[str(raw["model_type"])].from_dict(dict(raw)).to_dict()
    return completed


def _special(tokenizer: Tokenizer, folder: str) -> Callable[[str, str], str]:
    """Return a function for tokens by name; processor_config.json names some, and the tokenizer's config others."""
    stated = processor_config(folder) if folder else {}

    def named(name: str, default: str) -> str:
        found = stated.get(name) if name in TOKENS else None
        found = found or getattr(getattr(tokenizer, "hf", None), name, None)
        return found if isinstance(found, str) else default

    return named
