"""ImagePreprocessor: what an image or a video is in a prompt and for its encoder. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, first_line, one_line
from aiakq.runtime.multimodal.config_keys import (
    TOKENS,
    bad_processor_arguments,
    check_processor_arguments,
    check_processor_keys,
    processor_config,
)
from aiakq.runtime.multimodal.families import image_text
from aiakq.runtime.multimodal.images import decode_image, refused
from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor, Processed, record
from aiakq.runtime.multimodal.video_preprocessor import load_videos
from aiakq.runtime.multimodal.videos import Video, VideoFiles
from aiakq.runtime.protocol.media import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer

#: Width and height of the image with which the user's arguments are tried: what every processor takes.
_SIDE = 448


class ImagePreprocessor(MediaPreprocessor):
    """Preprocesses images with transformers' processor of the model, and videos."""

    kind = "image"

    def __init__(self, config: MultimodalConfig, processor: Any, tokenizer: Tokenizer) -> None:
        """Raises ``model_incomplete`` if the tokenizer lacks the token of images, and ``bad_option`` for arguments that
        the processor does not take.
        """
        [token] = tokenizer.raw_tokens([config.token_id])
        self._processor = processor
        named = _special(tokenizer, config.folder)
        completed = _completed(config.raw)
        self._text = image_text(config.architecture, completed, token, named)
        super().__init__(config, tokenizer, completed.get(self._text.placeholder_key, config.token_id))
        self.is_whole = self._text.is_whole
        self._videos, self._video_failure = load_videos(config, completed, tokenizer, named)
        given = dict(config.processor_kwargs)
        if self._videos is not None:
            self._tokens["video"] = (self._videos.token_id, self._videos.token_id)
            self.placeholder_texts["video"] = self._videos.token
            only_videos = self._videos.arguments - type(processor).valid_kwargs.__annotations__.keys()
            given = {name: value for name, value in given.items() if name not in only_videos}
        self._options = {**self._text.defaults, **given, **self._text.options}
        if given:
            self._try_arguments(given)

    def _try_arguments(self, given: Mapping[str, object]) -> None:
        """Process an image. Raises ``bad_option`` if ``given`` has other arguments or values than the processor."""
        from PIL.Image import new

        also = frozenset() if self._videos is None else self._videos.arguments
        check_processor_arguments(self._processor, given, self._text.options, also)
        try:
            self._processed(new("RGB", (_SIDE, _SIDE)), "an image")
        except AiakqError as failure:
            reason = str(failure.message).rstrip(".")
            raise bad_processor_arguments(given, reason, "Correct the value, or leave the argument out.") from None

    @classmethod
    def load(cls, config: MultimodalConfig, tokenizer: Tokenizer) -> ImagePreprocessor:
        """Load the image processor of a model. Raises ``no_pillow``, ``unsupported_parameter``,
        ``processor_key_unsupported``, ``bad_option`` and ``model_malformed``.
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

    def kind_of(self, media: object) -> MediaKind:
        """See ``MediaPreprocessor``. Raises why the processor of videos cannot be loaded."""
        if not isinstance(media, (Video, list, tuple)):
            return "image"
        if self._video_failure is not None:
            raise self._video_failure
        return "video"

    def _processed(self, media: Image | bytes | Video | VideoFiles, param: str) -> Processed:
        """See ``MediaPreprocessor``."""
        if isinstance(media, (Video, list, tuple)):
            assert self._videos is not None, "its placeholder is known"
            return self._videos.processed(media, param)
        return self._processed_image(media, param)

    def _processed_image(self, media: Any, param: str) -> Processed:
        image = decode_image(media, param) if isinstance(media, bytes) else media
        try:
            processed = self._processor([image], return_tensors="np", **self._options)
            text, grid = self._text.text(processed), self._text.grid(processed)
        except MemoryError:
            raise
        except Exception as failure:
            width, height = image.size
            reason = f"the model's image processor rejects it ({one_line(failure).rstrip('.')[:200]})"
            raise refused(param, f"{reason}; it has {width} x {height} pixels") from failure
        tensors = {name: record(processed[name]) for name in self._text.tensors if name in processed}
        return Processed(tensors, text, grid=grid)


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
