"""Unknown fields of objects that no request model declares: parts of a content, and objects with one of several types.

A misspelled field is refused, and others are ignored by name, as in the rest of a request; see unknown_fields.py. With
--unknown-fields refuse they are not checked, as those of messages and tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiakq.errors import error
from aiakq.server.api.foreign_field import NotSupported, refused
from aiakq.server.api.foreign_fields import MESSAGE_FIELDS
from aiakq.server.api.unknown_fields import UnknownFields

#: Fields that any object may have, which clients send back or which are hints for caches.
_COMMON = "type id status cache_control metadata provider_specific_fields provider_metadata index"
_TEXT = "text annotations logprobs citations parsed phase"
_REASONING = "thinking text reasoning reasoning_text content summary signature encrypted_content format data"


def fields(names: str) -> frozenset[str]:
    """Return the known fields of an object with ``names``, separated by spaces."""
    return frozenset(f"{_COMMON} {names}".split())


_PARTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), fields(_TEXT)),
    "refusal": fields("refusal"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text", "summary_text"), fields(_REASONING)),
    **dict.fromkeys(("image_url", "input_image"), fields("image_url detail file_id uuid")),
    "image": fields("source url image"),
    "video_url": fields("video_url uuid"),
    "video": fields("video"),
    "input_audio": fields("input_audio uuid"),
    "audio_url": fields("audio_url uuid"),
    "audio": fields("url audio"),
    "tool_use": fields("name input caller"),
    "tool_result": fields("tool_use_id content is_error"),
    **dict.fromkeys(("redacted_thinking", "redacted_reasoning"), fields("data")),
}
#: Field of a part that may be an object -> what that may have.
_MEDIA: Mapping[str, frozenset[str]] = {
    "image_url": fields("url detail uuid"),
    **dict.fromkeys(("video_url", "audio_url"), fields("url uuid")),
    "input_audio": fields("data format"),
    "source": fields("url data media_type"),
}
#: Fields of messages of chat that those of other APIs do not have.
_OTHER_MESSAGE_FIELDS = {
    **MESSAGE_FIELDS,
    **dict.fromkeys(("tool_calls", "function_call"), refused("here calls are parts or items", [])),
    "audio": refused("only text is read"),
}
#: Fields that may have a content in turn.
_NESTED = ("content", "summary", "thinking", "reasoning")
#: Depth of contents in contents, beyond that of any that is read.
_MAX_DEPTH = 8
_CHOICE = fields("function allowed_tools mode tools name namespace server_label")


class _NothingSent:
    """The request in which the fields of messages are: none of its own fields matters."""

    def sent(self, name: str) -> object:
        return None

    def has(self, name: str) -> bool:
        return False


def objects_of(values: object, path: str) -> Iterator[tuple[dict[str, object], str]]:
    """Return the objects in a list, or the only one, each with its path."""
    if isinstance(values, dict):
        values = [values]
    if isinstance(values, list):
        for number, value in enumerate(values):
            if isinstance(value, dict):
                yield value, f"{path}[{number}]"


def check_fields(
    part: Mapping[str, object],
    path: str,
    known: frozenset[str],
    unknown: UnknownFields,
    spelled: frozenset[str] = frozenset(),
    passes_on: bool = False,
) -> None:
    """Ignore or refuse the fields of ``part`` that are not ``known``; null is the same as none.

    spelled    further fields that are not misspelled.
    passes_on  whether they are passed on, and so not ignored.

    Raises ``unknown_field`` for a misspelled one.
    """
    if unknown.refuses or part.keys() <= known:
        return
    for name, value in part.items():
        if name not in known and value is not None:
            param = f"{path}.{name:.64}"
            if name not in spelled:
                unknown.check(param, name, known)
            if not passes_on:
                unknown.ignore(error("unknown_field", param=param, hint="It was ignored."))


def check_message(message: Mapping[str, object], path: str, known: frozenset[str], unknown: UnknownFields) -> None:
    """Call ``check_fields`` for a message of an API whose messages have no fields but ``known`` ones.

    Raises ``unsupported_parameter`` for those of other APIs without which the conversation would be another one.
    """
    harmless: set[str] = set()
    for name in message.keys() & _OTHER_MESSAGE_FIELDS.keys() - known:
        try:
            if message[name] is None or not _OTHER_MESSAGE_FIELDS[name].translate(message[name], _NothingSent()):
                harmless.add(name)
        except NotSupported as reason:
            if not _OTHER_MESSAGE_FIELDS[name].named:
                raise error("unsupported_parameter", param=f"{path}.{name}", reason=str(reason)) from None
    others = known | _OTHER_MESSAGE_FIELDS.keys()
    check_fields({name: message[name] for name in message if name not in harmless}, path, known, unknown, others)


def check_content(content: object, path: str, unknown: UnknownFields, depth: int = 0) -> None:
    """Call ``check_fields`` for the parts of a message's content, and for those in them."""
    if isinstance(content, str) or depth == _MAX_DEPTH:
        return
    for part, part_path in objects_of(content, path):
        kind = part.get("type", "text")
        known = _PARTS.get(kind) if isinstance(kind, str) else None
        if known is None:
            continue
        check_fields(part, part_path, known, unknown)
        if part.get("is_error"):
            unknown.ignore(error("unknown_field", param=f"{part_path}.is_error", hint="It was ignored."))
        for name in part.keys() & _MEDIA.keys():
            if isinstance(media := part[name], dict):
                check_fields(media, f"{part_path}.{name}", _MEDIA[name], unknown)
        for name in _NESTED:
            if name in part:
                check_content(part[name], f"{part_path}.{name}", unknown, depth + 1)


def check_choice(choice: object, unknown: UnknownFields) -> None:
    """Call ``check_fields`` for ``tool_choice``, in the form of chat or of responses, and for what is in it."""
    if not isinstance(choice, dict):
        return
    check_fields(choice, "tool_choice", _CHOICE, unknown)
    for name in ("function", "allowed_tools"):
        if isinstance(choice.get(name), dict):
            check_fields(choice[name], f"tool_choice.{name}", _CHOICE, unknown)
    for tool, path in objects_of(choice.get("tools"), "tool_choice.tools"):
        check_fields(tool, path, _CHOICE, unknown)
