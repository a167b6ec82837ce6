"""Literals of Python in generated text: their JSON, without evaluating anything."""

from __future__ import annotations

import ast
import json
import re

from aiakq.server.api.output.json_text import decoded, is_valid
from aiakq.server.api.output.scanner import Emit, Parsing, TextScanner

#: Most characters of a literal, whose syntax tree takes a hundred times as many bytes, and of a string.
MAX_LITERAL = 1 << 16
MAX_STRING = 1 << 20
#: Most brackets inside each other.
MAX_DEPTH = 64

_RUN = re.compile(r"[^\"'()\[\]{},\\]+")
_STRING_RUNS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def python_literal(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read the text of a literal up to a comma or a bracket that it does not open. Returns whether it is whole."""
    closing: list[str] = []
    while True:
        if run := text.span(_RUN):
            emit(run)
        character = yield from text.peek()
        if not character:
            return False
        if character in "\"'":
            if not (yield from _string(text, emit)):
                return False
        elif character in _CLOSING:
            if len(closing) >= MAX_DEPTH:
                return False
            closing.append(_CLOSING[character])
            emit(text.take())
        elif character in ")]}":
            if not closing:
                return True
            if character != closing.pop():
                return False
            emit(text.take())
        elif character == ",":
            if not closing:
                return True
            emit(text.take())
        elif character == "\\":
            emit(text.take())


def _string(text: TextScanner, emit: Emit) -> Parsing[bool]:
    quote = text.take()
    emit(quote)
    while True:
        if run := text.span(_STRING_RUNS[quote]):
            emit(run)
        character = yield from text.peek()
        if character == "\\":
            emit(text.take())
            if not (yield from text.peek()):
                return False
            emit(text.take())
        elif character == quote:
            emit(text.take())
            return True
        elif not character:
            return False


def python_value(text: str) -> str | None:
    """The JSON of a literal of Python or JSON; None if it is neither, or has no JSON."""
    text = text.strip()
    if is_valid(decoded(text, strict=True)):
        return text  # as it is written: numbers of JSON may be too large for Python's
    value = decoded(text)
    if not is_valid(value):
        is_string = text[:1] in ("'", '"')
        if len(text) > (MAX_STRING if is_string else MAX_LITERAL):
            return None
        text = _ESCAPE.sub(_known_escape, text)
        try:
            # Line breaks inside strings, which Python forbids, are meant as they stand.
            value = ast.literal_eval(text.replace("\n", "\\n") if is_string else text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _known_escape(match: re.Match[str]) -> str:
    """An escape sequence; a backslash that begins none stands for itself."""
    return match[0] if match[1] in "\\'\"abfnrtvxuUN01234567\n" else "\\" + match[0]
