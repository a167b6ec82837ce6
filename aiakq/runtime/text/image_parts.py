"""Images and videos among the parts of a message: their spellings in several APIs, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error

#: Types of parts with a video, and with an image or a video.
VIDEO_PARTS = frozenset({"video_url", "video"})
IMAGE_PARTS = VIDEO_PARTS | {"image_url", "input_image", "image", "image_pil"}
#: Values of ``detail``. Every model has one way to read an image, so that it has no effect.
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True)
class ImageSource:
    """Where an image or a video comes from: a URL, an image of Pillow, or a video as ``videos.video_of`` takes it.

    param  its name in errors.
    """

    param: str
    url: str = ""
    image: Any = None
    is_video: bool = False


@dataclass(frozen=True)
class ImagePart:
    """A part of a message with an image or a video; its fields are read by ``source`` only, where the model reads them.

    kind  its type.
    path  its path in the request.
    """

    part: dict[str, Any]
    kind: str
    path: str

    @property
    def modality(self) -> str:
        """The type of part that stands for it in templates."""
        return "video" if self.kind in VIDEO_PARTS else "image"

    def source(self) -> ImageSource:
        """Return where the image comes from.

        Raises ``missing_field``, ``invalid_type``, ``value_out_of_range`` and ``unsupported_parameter``.
        """
        part, path = self.part, self.path
        if self.kind in VIDEO_PARTS:
            return _video_url(part, self.kind, path)
        if self.kind == "image_pil":
            return _pillow_image(part.get("image_pil"), f"{path}.image_pil")
        if self.kind in ("image_url", "input_image"):
            return _image_url(part, path)
        if part.get("source") is not None:
            return _source(part["source"], f"{path}.source")
        for name in ("url", "image"):
            value, param = part.get(name), f"{path}.{name}"
            if value is not None:
                return ImageSource(param, url=value) if isinstance(value, str) else _pillow_image(value, param)
        raise error("missing_field", param=f"{path}.source")

    def refused(self, reason: str) -> AiakqError:
        """Return the error where no images are read, for ``reason``."""
        return error("unsupported_parameter", param=f"{self.path}.type", reason=f"{self.kind:.64}: {reason}")


def image_part(part: dict[str, Any], kind: str, path: str) -> ImagePart:
    """Return the image of a part, which may be one that ``take_images`` has not taken yet."""
    found = part.get("image")
    return found if isinstance(found, ImagePart) else ImagePart(part, kind, path)


def take_images(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImagePart]]:
    """Return the messages with parts of type image and video that have nothing else, and the images and videos, in
    order.
    """
    taken: list[dict[str, Any]] = []
    images: list[ImagePart] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part.get("image"), ImagePart) for part in content):
            images += [part["image"] for part in content if isinstance(part.get("image"), ImagePart)]
            message = {**message, "content": [_bare(part) for part in content]}
        taken.append(message)
    return taken, images


def _image_url(part: dict[str, Any], path: str) -> ImageSource:
    """Read the fields ``image_url`` and ``detail`` of OpenAI's APIs."""
    param, value, detail = f"{path}.image_url", part.get("image_url"), part.get("detail")
    if value is None and part.get("file_id") is not None:
        raise error("unsupported_parameter", param=f"{path}.file_id", reason="files are not stored")
    if isinstance(value, dict):
        param, detail, value = f"{param}.url", value.get("detail", detail), value.get("url")
    if detail is not None and detail not in _DETAILS:
        raise error("value_out_of_range", param=f"{path}.detail", value=f"{detail!s:.64}", allowed=", ".join(_DETAILS))
    return ImageSource(param, url=_url(value, param))


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    found = part.get("image")
    return {"type": found.modality} if isinstance(found, ImagePart) else part


def _video_url(part: dict[str, Any], kind: str, path: str) -> ImageSource:
    """Read the fields ``video_url`` of vLLM's API, and ``video`` of Qwen's."""
    param, value = f"{path}.{kind}", part.get(kind)
    if isinstance(value, dict):
        param, value = f"{param}.url", value.get("url")
    return ImageSource(param, url=_url(value, param), is_video=True)


def _source(source: object, path: str) -> ImageSource:
    """Read the field ``source`` of Anthropic's API."""
    if not isinstance(source, dict):
        raise error("invalid_type", param=path, reason="an object with a type is expected")
    kind = source.get("type")
    if kind == "url":
        return ImageSource(f"{path}.url", url=_url(source.get("url"), f"{path}.url"))
    if kind == "base64":
        data, media = source.get("data"), source.get("media_type", "")
        if not isinstance(media, str):
            raise error("invalid_type", param=f"{path}.media_type", reason="a string is expected")
        return ImageSource(f"{path}.data", url=f"data:{media};base64,{_url(data, f'{path}.data')}")
    reason = f"{kind!r:.64}: an image is given as base64 or url"
    raise error("unsupported_parameter", param=f"{path}.type", reason=reason)


def _url(value: object, name: str) -> str:
    if value is None:
        raise error("missing_field", param=name)
    if not isinstance(value, str):
        raise error("invalid_type", param=name, reason="a string is expected")
    return value


def _pillow_image(image: object, name: str) -> ImageSource:
    if image is None or isinstance(image, (str, dict, list, int, float)):
        raise error("invalid_type", param=name, reason="an image of Pillow is expected")
    return ImageSource(name, image=image)
