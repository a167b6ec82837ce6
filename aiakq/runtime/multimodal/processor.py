"""ImagePreprocessor: what an image is in a prompt and for its encoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, first_line, one_line
from aiakq.runtime.multimodal.config_keys import (
    bad_processor_arguments,
    check_processor_arguments,
    check_processor_keys,
    completed_config,
    special_token,
)
from aiakq.runtime.multimodal.families import image_text
from aiakq.runtime.multimodal.images import decode_image, refused
from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor
from aiakq.runtime.multimodal.processed import Processed, record

if TYPE_CHECKING:
    from PIL.Image import Image

    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer

#: Width and height of the image with which the user's arguments are tried: what every processor takes.
_SIDE = 448


class ImagePreprocessor(MediaPreprocessor):
    """Preprocesses images with transformers' processor of the model."""

    kind = "image"

    def __init__(
        self,
        config: MultimodalConfig,
        processor: Any,
        tokenizer: Tokenizer,
        video_arguments: frozenset[str] = frozenset(),
    ) -> None:
        """video_arguments: those of --mm-processor-kwargs that the model's video processor takes.

        Raises ``model_incomplete`` if the tokenizer lacks the token of images, and ``bad_option`` for arguments that
        the processor does not take.
        """
        [token] = tokenizer.raw_tokens([config.token_ids["image"]])
        self._processor = processor
        named = special_token(tokenizer, config.folder)
        completed = completed_config(config.raw)
        self._text = image_text(config.architecture, completed, token, named)
        super().__init__(config, tokenizer, completed.get(self._text.placeholder_key))
        self.is_whole = self._text.is_whole
        only_videos = video_arguments - type(processor).valid_kwargs.__annotations__.keys()
        given = {name: value for name, value in config.processor_kwargs.items() if name not in only_videos}
        self._options = {**self._text.defaults, **given, **self._text.options}
        if given:
            self._try_arguments(given, video_arguments)

    def _try_arguments(self, given: Mapping[str, object], video_arguments: frozenset[str]) -> None:
        """Process an image. Raises ``bad_option`` if ``given`` has other arguments or values than the processor."""
        from PIL.Image import new

        check_processor_arguments(self._processor, given, self._text.options, video_arguments)
        try:
            self.processed(new("RGB", (_SIDE, _SIDE)), "an image")
        except AiakqError as failure:
            reason = str(failure.message).rstrip(".")
            raise bad_processor_arguments(given, reason, "Correct the value, or leave the argument out.") from None

    @classmethod
    def load(
        cls, config: MultimodalConfig, tokenizer: Tokenizer, video_arguments: frozenset[str] = frozenset()
    ) -> ImagePreprocessor:
        """Load the image processor of a model; see ``__init__``. Raises ``no_pillow``, ``unsupported_parameter``,
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
            return cls(config, processor, tokenizer, video_arguments)
        except (AiakqError, MemoryError):
            raise
        except Exception as failure:
            file = f"the image processor in '{folder}'"
            raise error("model_malformed", file=file, reason=first_line(failure)[:200]) from failure

    def processed(self, media: Image | bytes, param: str) -> Processed:
        """See ``MediaPreprocessor``."""
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
