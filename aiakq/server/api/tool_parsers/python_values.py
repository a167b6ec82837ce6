"""Convert Python literals in generated text to JSON, without evaluating code."""

from __future__ import annotations

import ast
import json
import re

from aiakq.server.api.output.json_values import decoded, is_valid
from aiakq.server.api.output.scanner import Emit, Parsing, TextScanner

#: Maximum number of characters of a literal, whose syntax tree takes 100 times as many bytes, and of a string.
MAX_LITERAL = 1 << 16
MAX_STRING = 1 << 20
#: Maximum nesting depth.
MAX_DEPTH = 64

_RUN = re.compile(r"[^\"'()\[\]{},\\]+")
_STRING_RUNS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def python_literal(text: TextScanner, emit: Emit) -> Parsing[bool]:
    """Read a literal up to a comma or an unmatched closing bracket. Returns whether it is complete."""
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
    """Return the JSON of a Python or JSON literal, or None if it is neither or has no JSON equivalent."""
    text = text.strip()
    if is_valid(decoded(text, strict=True)):
        return text  # unchanged, because JSON numbers may be too large for Python
    value = decoded(text)
    if not is_valid(value):
        is_string = text[:1] in ("'", '"')
        if len(text) > (MAX_STRING if is_string else MAX_LITERAL):
            return None
        text = _ESCAPE.sub(_known_escape, text)
        try:
            # Python forbids line breaks in strings; keep them literally.
            value = ast.literal_eval(text.replace("\n", "\\n") if is_string else text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _known_escape(match: re.Match[str]) -> str:
    """Return an escape sequence; a backslash that starts none is escaped."""
    return match[0] if match[1] in "\\'\"abfnrtvxuUN01234567\n" else "\\" + match[0]
