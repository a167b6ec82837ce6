"""Literals of Python in generated text: their JSON, without evaluating anything."""

from __future__ import annotations

import ast
import json
import re

from aiakq.server.api.output.json_text import MAX_DEPTH, decoded, is_valid
from aiakq.server.api.output.scanner import Emit, Parsing, TextScanner

#: Most characters of one literal.
MAX_LITERAL = 1 << 20
#: Python's own parser is recursive.
MAX_LITERAL_DEPTH = 64

_RUN = re.compile(r"[^\"'()\[\]{},\\]+")
_STRING_RUNS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": "true", "false": "false", "null": "null"}


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
        elif character:
            emit(text.take()) if character == quote else None
            if character == quote:
                return True
        else:
            return False


def python_value(text: str) -> str | None:
    """The JSON of a literal; None if it is none, or has none. true, false and null are literals, too."""
    text = text.strip()
    if text in _WORDS:
        return text
    if len(text) > MAX_LITERAL or _depth(text) > MAX_LITERAL_DEPTH:
        return None
    try:
        # Line breaks inside strings, which Python forbids, are meant as they stand.
        value = ast.literal_eval(text.replace("\n", "\\n") if "\n" in text and text[0] in "\"'" else text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text if is_valid(decoded(text)) else None


def _depth(text: str) -> int:
    """At least how deep brackets, and operators in front of a value, are inside each other."""
    depth = deepest = 0
    for character in re.findall(r"[()\[\]{}]", text):
        depth += 1 if character in "([{" else -1
        deepest = max(deepest, depth)
    signs = max(map(len, re.findall(r"[+\-~ ]{2,}", text)), default=0)
    return max(deepest, signs)
