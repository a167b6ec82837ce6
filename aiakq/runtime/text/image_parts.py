"""Images among the parts of a message: their spellings in several APIs, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error

#: Types of parts with an image.
IMAGE_PARTS = frozenset({"image_url", "input_image", "image", "image_pil"})
#: Values of ``detail``. Every model has one way to read an image, so that it has no effect.
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True)
class ImageSource:
    """Where an image comes from: a URL, or an image of Pillow.

    param  its name in errors.
    kind   type of its part.
    """

    param: str
    url: str = ""
    image: Any = None
    kind: str = "image"


def read_image(part: dict[str, Any], kind: str, path: str) -> ImageSource:
    """Return the source of the image in a part of type ``kind``.

    Raises ``missing_field``, ``invalid_type``, ``value_out_of_range`` and ``unsupported_parameter``.
    """
    if isinstance(part.get("image"), ImageSource):  # it was read before
        found: ImageSource = part["image"]
        return found
    detail = part.get("detail")
    if kind == "image_pil":
        return _pillow_image(part.get("image_pil"), f"{path}.image_pil")
    if kind in ("image_url", "input_image"):
        name, value = f"{path}.image_url", part.get("image_url")
        if value is None and part.get("file_id") is not None:
            raise error("unsupported_parameter", param=f"{path}.file_id", reason="files are not stored")
        if isinstance(value, dict):
            name, detail, value = f"{name}.url", value.get("detail", detail), value.get("url")
        _check_detail(detail, f"{path}.detail")
        return ImageSource(name, url=_url(value, name), kind=kind)
    source = part.get("source")
    if source is not None:
        return _source(source, f"{path}.source")
    for name in ("url", "image"):
        if part.get(name) is not None:
            is_url = isinstance(part[name], str)
            return (
                ImageSource(f"{path}.{name}", url=part[name]) if is_url else _pillow_image(part[name], f"{path}.{name}")
            )
    raise error("missing_field", param=f"{path}.source")


def text_only(source: ImageSource, reason: str) -> AiakqError:
    """Return the error for an image where only text is read, for ``reason``."""
    return error("unsupported_parameter", param=source.param, reason=f"{source.kind}: {reason}")


def take_images(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return the messages with parts of type image that have nothing else, and the sources of the images, in order."""
    taken: list[dict[str, Any]] = []
    sources: list[ImageSource] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part.get("image"), ImageSource) for part in content):
            sources += [part["image"] for part in content if part.get("type") == "image"]
            message = {**message, "content": [_bare(part) for part in content]}
        taken.append(message)
    return taken, sources


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part.get("type") == "image" else part


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


def _check_detail(detail: object, name: str) -> None:
    if detail is not None and detail not in _DETAILS:
        raise error("value_out_of_range", param=name, value=f"{detail!s:.64}", allowed=", ".join(_DETAILS))


def _pillow_image(image: object, name: str) -> ImageSource:
    if image is None or isinstance(image, (str, dict, list, int, float)):
        raise error("invalid_type", param=name, reason="an image of Pillow is expected")
    return ImageSource(name, image=image)
