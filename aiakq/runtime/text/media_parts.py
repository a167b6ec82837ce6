"""Images, videos and audios among the parts of a message: their spellings in several APIs, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.media import MediaKind, MediaLimits

#: Types of parts with media -> their kind.
MEDIA_PARTS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil"), "image"),
    **dict.fromkeys(("video_url", "video"), "video"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
}
#: Values of ``format`` of audio, which is found out from the file.
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aiff")
#: Values of ``detail``. Every model has one way to read an image, so that it has no effect.
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True)
class MediaSource:
    """Where an image, video or audio comes from: a URL, or a value: an image of Pillow, a video as ``videos.video_of``
    takes it, or samples.

    param  its name in errors.
    """

    kind: MediaKind
    param: str
    url: str = ""
    value: Any = None


@dataclass(frozen=True)
class MediaPart:
    """A part of a message with an image, video or audio; its fields are read by ``source`` only, where the model reads
    it.

    kind  its type.
    path  its path in the request.
    """

    part: dict[str, Any]
    kind: str
    path: str

    @property
    def media(self) -> MediaKind:
        """What it holds."""
        return MEDIA_PARTS[self.kind]

    def source(self) -> MediaSource:
        """Return where the image, video or audio comes from.

        Raises ``missing_field``, ``invalid_type``, ``value_out_of_range`` and ``unsupported_parameter``.
        """
        part, path = self.part, self.path
        if self.media == "audio":
            return _audio(part, self.kind, path)
        if self.media == "video":
            return _video_url(part, self.kind, path)
        if self.kind == "image_pil":
            return _pillow_image(part.get("image_pil"), f"{path}.image_pil")
        if self.kind in ("image_url", "input_image"):
            return _image_url(part, path)
        name = _only_one(part, ("source", "url", "image"), path)
        value, param = part.get(name), f"{path}.{name}"
        if value is None:
            raise error("missing_field", param=f"{path}.source")
        if name == "source":
            return _source(value, param)
        return MediaSource("image", param, url=value) if isinstance(value, str) else _pillow_image(value, param)

    def refused(self, reason: str) -> AiakqError:
        """Return the error where such parts are not read, for ``reason``."""
        return error("unsupported_parameter", param=f"{self.path}.type", reason=f"{self.kind:.64}: {reason}")


def media_part(part: dict[str, Any], kind: str, path: str) -> MediaPart:
    """Return the image, video or audio of a part, which may be one that ``take_media`` has not taken yet."""
    found = part.get(kind)
    return found if isinstance(found, MediaPart) else MediaPart(part, kind, path)


def take_media(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Return the messages with parts of type image, video and audio that have nothing else, and the media, in order."""
    taken: list[dict[str, Any]] = []
    media: list[MediaPart] = []
    for message in messages:
        content = message.get("content")
        found = [_held(part) for part in content] if isinstance(content, list) else []
        if any(found):
            media += filter(None, found)
            message = {**message, "content": [_bare(part) for part in content or ()]}
        taken.append(message)
    return taken, media


def check_read(media: Sequence[MediaPart], limits: MediaLimits) -> None:
    """Raise ``unsupported_parameter`` for media of a kind that the model does not read."""
    for each in media:
        if refusal := limits.refusal_of(each.media):
            raise each.refused(refusal)


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    held = _held(part)
    return part if held is None else {"type": held.media}


def _held(part: dict[str, Any]) -> MediaPart | None:
    """Return what a part holds that ``MediaPart`` stands for; None for others."""
    found = part.get(str(part.get("type")))
    return found if isinstance(found, MediaPart) else None


def _audio(part: dict[str, Any], kind: str, path: str) -> MediaSource:
    """Read the fields of OpenAI's ``input_audio``, of vLLM's ``audio_url``, and of ``audio`` with a URL or samples."""
    if kind == "input_audio":
        value, param = part.get("input_audio"), f"{path}.input_audio"
        if value is None:
            raise error("missing_field", param=param)
        if not isinstance(value, dict):
            raise error("invalid_type", param=param, reason="an object with data and format is expected")
        format = "wav" if value.get("format") is None else value["format"]
        if format not in _AUDIO_FORMATS:
            allowed = ", ".join(_AUDIO_FORMATS)
            raise error("value_out_of_range", param=f"{param}.format", value=f"{format!s:.64}", allowed=allowed)
        param = f"{param}.data"
        return MediaSource("audio", param, url=f"data:audio/{format};base64,{_url(value.get('data'), param)}")
    name = _only_one(part, ("audio_url", "url", "audio"), path)
    value, param = part.get(name), f"{path}.{name}"
    if value is None:
        raise error("missing_field", param=f"{path}.{'audio_url' if kind == 'audio_url' else 'url'}")
    if isinstance(value, dict) and name == "audio_url":
        param, value = f"{param}.url", value.get("url")
        return MediaSource("audio", param, url=_url(value, param))
    return MediaSource("audio", param, url=value) if isinstance(value, str) else _samples(value, param)


def _only_one(part: Mapping[str, Any], names: Sequence[str], path: str) -> str:
    """Return which of ``names`` a part has. Raises ``unsupported_parameter`` for several: one would be lost."""
    found = [name for name in names if part.get(name) is not None]
    if len(found) > 1:
        raise error("unsupported_parameter", param=f"{path}.{found[1]}", reason=f"the part has {found[0]}, too")
    return found[0] if found else names[0]


def _samples(value: object, name: str) -> MediaSource:
    if isinstance(value, (dict, list, int, float)):  # as JSON has them
        raise error("invalid_type", param=name, reason="a URL, an array of samples or (samples, rate) is expected")
    return MediaSource("audio", name, value=value)


def _video_url(part: dict[str, Any], kind: str, path: str) -> MediaSource:
    """Read the fields ``video_url`` of vLLM's API, and ``video`` of Qwen's."""
    param, value = f"{path}.{kind}", part.get(kind)
    if isinstance(value, dict):
        param, value = f"{param}.url", value.get("url")
    return MediaSource("video", param, url=_url(value, param))


def _image_url(part: dict[str, Any], path: str) -> MediaSource:
    """Read the fields ``image_url`` and ``detail`` of OpenAI's APIs."""
    param, value, detail = f"{path}.image_url", part.get("image_url"), part.get("detail")
    if value is None and part.get("file_id") is not None:
        raise error("unsupported_parameter", param=f"{path}.file_id", reason="files are not stored")
    if isinstance(value, dict):
        param, detail, value = f"{param}.url", value.get("detail", detail), value.get("url")
    if detail is not None and detail not in _DETAILS:
        raise error("value_out_of_range", param=f"{path}.detail", value=f"{detail!s:.64}", allowed=", ".join(_DETAILS))
    return MediaSource("image", param, url=_url(value, param))


def _source(source: object, path: str) -> MediaSource:
    """Read the field ``source`` of Anthropic's API."""
    if not isinstance(source, dict):
        raise error("invalid_type", param=path, reason="an object with a type is expected")
    kind = source.get("type")
    if kind == "url":
        return MediaSource("image", f"{path}.url", url=_url(source.get("url"), f"{path}.url"))
    if kind == "base64":
        data, media = source.get("data"), source.get("media_type", "")
        if not isinstance(media, str):
            raise error("invalid_type", param=f"{path}.media_type", reason="a string is expected")
        return MediaSource("image", f"{path}.data", url=f"data:{media};base64,{_url(data, f'{path}.data')}")
    reason = f"{kind!r:.64}: an image is given as base64 or url"
    raise error("unsupported_parameter", param=f"{path}.type", reason=reason)


def _url(value: object, name: str) -> str:
    if value is None:
        raise error("missing_field", param=name)
    if not isinstance(value, str):
        raise error("invalid_type", param=name, reason="a string is expected")
    return value


def _pillow_image(image: object, name: str) -> MediaSource:
    if image is None or isinstance(image, (str, dict, list, int, float)):
        raise error("invalid_type", param=name, reason="an image of Pillow is expected")
    return MediaSource("image", name, value=image)
