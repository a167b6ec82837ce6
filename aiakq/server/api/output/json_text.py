"""Incremental JSON parsing in generated text: pass values through, and parse the object of a tool call.

Arguments are not re-serialized but emitted as the model wrote them. Only invalid characters of strings that models do
write (line breaks, unknown escapes) are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_values import decoded, is_valid
from aiakq.server.api.output.scanner import Emit, Parsing, TextScanner

#: Maximum nesting depth.
MAX_DEPTH = 256
#: Maximum number of characters of a name or a key.
MAX_NAME = 256

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r"[ \t\r\n0-9A-Za-z.,:+\-]+")
_SCALAR = re.compile(r"[0-9A-Za-z.+\-]+")
_CLOSING = {"{": "}", "[": "]"}


def json_value(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read a value and emit its text in pieces. Returns whether it is complete; stops at malformed JSON."""
    first = yield from text.peek()
    if first == '"':
        return (yield from json_string(text, emit))
    if first not in _CLOSING:
        return (yield from _scalar(text, emit))
    closing: list[str] = []
    while True:
        if run := text.span(_BETWEEN):
            emit(run)
        character = yield from text.peek()
        if character == '"':
            if not (yield from json_string(text, emit)):
                return False
        elif character in _CLOSING and len(closing) < MAX_DEPTH:
            closing.append(_CLOSING[character])
            emit(text.take())
        elif character and character == closing[-1]:
            closing.pop()
            emit(text.take())
            if not closing:
                return True
        elif not character or not _BETWEEN.match(character):
            return False


def json_string(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read a string, like ``json_value``."""
    if (yield from text.peek()) != '"':
        return False
    emit(text.take())
    while True:
        if run := text.span(_STRING_RUN):
            emit(run)
        character = yield from text.peek()
        if character == '"':
            emit(text.take())
            return True
        if character == "\\":
            text.take()
            escaped = yield from text.peek()
            if not escaped:
                return False
            if escaped in '"\\/bfnrtu':
                emit("\\" + text.take())
            else:  # \' is ', and \d, of a regular expression, was meant to be \\d
                emit("" if escaped == "'" else "\\\\")
        elif not character:
            return False
        elif character < " ":
            emit(json.dumps(text.take())[1:-1])


def _scalar(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read a number or a literal, up to the first other character or the end."""
    pieces: list[str] = []
    while (character := (yield from text.peek())) and _SCALAR.match(character):
        pieces.append(text.span(_SCALAR))
        emit(pieces[-1])
    return bool(pieces) and bool(character) and is_valid(decoded("".join(pieces)))


def read_string(text: TextScanner) -> Parsing[str | None]:
    """Read a string of at most ``MAX_NAME`` characters and return its value, or None if there is none."""
    pieces: list[str] = []
    if not (yield from json_string(text, pieces.append)):
        return None
    value = decoded("".join(pieces))
    return value if isinstance(value, str) and len(value) <= MAX_NAME else None


def arguments_value(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read the arguments of a call and emit them in pieces as the text of an object; nothing if they are null.

    Some models write the object as a string.
    """
    first = yield from text.peek()
    if first == "{":
        return (yield from json_value(text, emit))
    pieces: list[str] = []
    complete = yield from json_value(text, pieces.append)
    written = "".join(pieces)
    value = decoded(written)
    if isinstance(value, str) and isinstance(decoded(value), dict):
        emit(value)
    elif value is not None:
        emit(written)
    return complete


def json_call(
    text: TextScanner,
    output: EventSink,
    name_keys: Collection[str] = ("name",),
    argument_keys: Collection[str] = ("arguments", "parameters"),
    accepts: Callable[[str], bool] | None = None,
) -> Parsing[bool]:
    """Read an object such as {"name": "f", "arguments": {}} as a call. Returns whether there was one.

    An object without a name is not a call. Arguments before the name are buffered. Other keys are ignored.

    accepts  predicate for the name, which then must be the first key, except for ``"type": "function"``.
    """
    text.take()  # the brace
    name = ""
    buffered: list[str] | None = None
    started = complete = malformed = False
    while not malformed:
        yield from text.skip_spaces()
        mark = yield from text.match("}", ",")
        if mark == "}":
            complete = True
            break
        if mark:
            continue
        key = yield from _key(text)
        if key in argument_keys and not started and buffered is None and (name or accepts is None):
            if name:
                output.start_call(name)
                started = True
            buffered = []
            malformed = not (yield from arguments_value(text, output.arguments if name else buffered.append))
        elif key in name_keys and not name:
            name = (yield from read_string(text)) or ""
            if not name or (accepts is not None and not accepts(name)):
                return False
            if buffered is not None:
                output.start_call(name)
                output.arguments("".join(buffered))
                started = True
        elif accepts is not None and not name:
            if key != "type" or (yield from read_string(text)) != "function":
                return False
        else:
            malformed = key is None or not (yield from json_value(text, lambda piece: None))
    if complete and name and not started:
        output.start_call(name)
        started = True
    if started and (complete or not text.is_exhausted):  # else the text is truncated
        output.end_call()
    return started


def _key(text: TextScanner) -> Parsing[str | None]:
    """Read a key of an object and the colon after it; None if there is none."""
    key = yield from read_string(text)
    yield from text.skip_spaces()
    if key is None or not (yield from text.match(":")):
        return None
    yield from text.skip_spaces()
    return key
