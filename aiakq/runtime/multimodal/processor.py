"""ImagePreprocessor: images, videos and the tokens of a prompt become ``MediaItem``s. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from aiakq.runtime.multimodal.processed import Processed, record
from aiakq.runtime.multimodal.video_preprocessor import load_videos
from aiakq.runtime.multimodal.videos import Video, VideoFiles
from aiakq.runtime.protocol.media import MediaItem

if TYPE_CHECKING:
    from PIL.Image import Image

    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer

    #: An image in RGB, or its file; a video, or its files.
    Medium = Image | bytes | Video | VideoFiles

#: Width and height of the image with which the user's arguments are tried: what every processor takes.
_SIDE = 448


class ImagePreprocessor:
    """Preprocesses images with transformers' processor of the model, and videos, one at a time.

    Each is processed alone: what its tensors are does not depend on the others of the prompt.

    image_token  the placeholder of images.
    video_token  that of videos; "" if they are not read.
    """

    def __init__(self, config: MultimodalConfig, processor: Any, tokenizer: Tokenizer) -> None:
        """Raises ``model_incomplete`` if the tokenizer lacks the token of images, and ``bad_option`` for arguments that
        the processor does not take.
        """
        self._image_token_id = config.image_token_id
        [token] = tokenizer.raw_tokens([config.image_token_id])
        self._encode: Callable[[str, bool], list[int]] = tokenizer.encode
        self._processor = processor
        named = _special(tokenizer, config.folder)
        completed = _completed(config.raw)
        self._text = image_text(config.architecture, completed, token, named)
        self._placeholder_id = completed.get(self._text.placeholder_key, config.image_token_id)
        [self.image_token] = tokenizer.raw_tokens([self._placeholder_id])
        self._newlines = Newlines(tokenizer)
        self._videos, self._video_failure = load_videos(config, completed, tokenizer, named)
        self.video_token, given = "", dict(config.processor_kwargs)
        if self._videos is not None:
            self.video_token, of_images = self._videos.token, type(processor).valid_kwargs.__annotations__
            only_videos = self._videos.arguments - of_images.keys()
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

    @property
    def placeholders(self) -> dict[str, str]:
        """The placeholders of images and videos by their kind."""
        return {"image": self.image_token, "video": self.video_token}

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

    def expanded(
        self, token_ids: Sequence[int], media: Sequence[Medium], params: Sequence[str], prompt: str = "prompt"
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with each placeholder replaced by the tokens of its image or video, and these.

        media   images and videos, those of either kind in the order of their placeholders.
        params  names of them in errors.
        prompt  that of the prompt.

        Raises ``media_refused`` for an image that is damaged or too large or that the processor rejects, and unless
        there are as many placeholders, ``processor_key_unsupported`` and ``model_malformed`` if the model's video
        processor is not understood.
        """
        waiting = self._by_placeholder(token_ids, media, params, prompt)
        ids: list[int] = []
        items = []
        begin = 0
        for at, token in enumerate(token_ids):
            if token not in waiting:
                continue
            ids += token_ids[begin:at]
            medium, param = waiting[token].popleft()
            processed, begin = self._processed_medium(medium, param), at + 1
            text = processed.text
            if processed.begins_alone and ids and not self._newlines.ends_word(ids[-1]):
                raise refused(param, "text before a video has to end with a line end or a special token")
            if text.endswith("\n"):  # a tokenizer has tokens for several line ends
                text, begin = self._joined(text, ids, token_ids, begin, param)
            own = self._encode(text, False)
            items.append(processed.item(own, len(ids)))
            ids += own
        return ids + list(token_ids[begin:]), tuple(items)

    def _by_placeholder(
        self, token_ids: Sequence[int], media: Sequence[Medium], params: Sequence[str], prompt: str
    ) -> dict[int, deque[tuple[Medium, str]]]:
        """Return ``media`` and their names by their placeholders. Raises as ``expanded``."""
        waiting: dict[int, deque[tuple[Medium, str]]] = {self._placeholder_id: deque()}
        if self._videos is not None:
            waiting[self._videos.token_id] = deque()
        for medium, param in zip(media, params, strict=True):
            if not _is_video(medium):
                waiting[self._placeholder_id].append((medium, param))
            elif self._videos is not None:
                waiting[self._videos.token_id].append((medium, param))
            else:
                raise self._video_failure or refused(param, "videos are not read")
        if self._placeholder_id != self._image_token_id and self._image_token_id in token_ids:
            raise refused(prompt, f"it has the token {self._image_token_id}, which stands for a part of an image")
        for token, listed in waiting.items():
            found = token_ids.count(token)
            if found != len(listed):
                what, text = (
                    ("images", self.image_token) if token == self._placeholder_id else ("videos", self.video_token)
                )
                raise refused(prompt, f"there are {len(listed)} {what} for its {found} placeholders {text}")
        return waiting

    def _joined(self, text: str, ids: list[int], token_ids: Sequence[int], begin: int, param: str) -> tuple[str, int]:
        """Return the text of an image with the line ends around it, which are removed from ``ids``, and the first token
        behind these: transformers' processor tokenizes all of them together.

        Raises ``media_refused`` if ``text`` begins with a word that could be the end of another one.
        """
        if not text.startswith("\n") and ids and not self._newlines.ends_word(ids[-1]):
            raise refused(param, "with pan and scan, an image has to begin a line")
        before = after = 0
        while text.startswith("\n") and ids and (count := self._newlines.count(ids[-1])):
            before += count
            ids.pop()
        while begin < len(token_ids) and (count := self._newlines.count(token_ids[begin])):
            after += count
            begin += 1
        return "\n" * before + text + "\n" * after, begin

    def _processed_medium(self, medium: Any, param: str) -> Processed:
        """Return an image or a video. Raises as ``expanded``."""
        if isinstance(medium, bytes):
            return self._processed(decode_image(medium, param), param)
        if not isinstance(medium, (Video, Sequence)):
            return self._processed(medium, param)
        assert self._videos is not None, "_by_placeholder has refused it"
        return self._videos.processed(medium, param)

    def _processed(self, image: Image, param: str) -> Processed:
        """Return one image."""
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
        return Processed("image", text, self._image_token_id, tensors, grid, self._text.is_whole)


def _is_video(medium: object) -> bool:
    return isinstance(medium, (Video, Sequence)) and not isinstance(medium, bytes)


class Newlines:
    """Which tokens are line ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._counts: dict[int, int] = {}

    def count(self, token: int) -> int:
        """Return the number of line ends that ``token`` consists of; 0 for any other token."""
        found = self._counts.get(token)
        if found is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            found = self._counts[token] = len(text) if text.strip("\n") == "" else 0
        return found

    def ends_word(self, token: int) -> bool:
        """Whether no word of text goes on behind ``token``."""
        return self.count(token) > 0 or token in self._tokenizer.special_ids


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
