"""Regular expressions of JSON Schema (ECMA-262), translated to those of llguidance (Rust's regex-syntax)."""

from __future__ import annotations

import re

#: White space and line terminators of ECMA-262, as ranges of a class.
_SPACE = r"\t-\r\x20\xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_NOT_SPACE = (
    r"\x{0}-\x{8}\x{E}-\x{1F}\x{21}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF}\x{200B}-\x{2027}\x{202A}-\x{202E}"
    r"\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{FEFE}\x{FF00}-\x{10FFFF}"
)
#: Classes by the letter of their escape, as ranges.
_CLASSES = {
    "d": "0-9",
    "D": r"\x{0}-/:-\x{10FFFF}",
    "w": "0-9A-Z_a-z",
    "W": r"\x{0}-/:-@\x{5B}-\x{5E}`\x{7B}-\x{10FFFF}",
    "s": _SPACE,
    "S": _NOT_SPACE,
}
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "v": r"\x0B", "f": r"\x0C", "0": r"\x00"}
#: Anchors of Python and Rust, which schemas made by their libraries contain.
_ANCHORS = {"A": "^", "z": "$", "Z": "$"}
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_QUANTIFIER = re.compile(r"\{\d+(,\d*)?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|c([A-Za-z])")
_LOW_HALF = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP](\{[^}]*\}|[A-Z])")
#: Characters that have to be escaped outside and inside of classes.
_SPECIAL, _SPECIAL_IN_CLASS = frozenset("{}]"), frozenset("[&~-^")


#: What regular expressions without memory cannot express, outside of classes.
_REFUSED = re.compile(
    r"(?P<reference>\\(?:k<[^>]*>|[1-9])|\(\?P=)|(?P<boundary>\\[bB])|(?P<around>\(\?<?[=!])"
    r"|\\.|\[(?:\\.|[^\]\\])*\]",
    re.DOTALL,
)
_REASONS = {
    "reference": "a backreference",
    "boundary": "a word boundary",
    "around": "a lookahead or lookbehind",
}


def refused_part(pattern: str) -> str:
    """What ``pattern`` has that no grammar can enforce; empty if there is nothing."""
    if "(?" not in pattern and "\\" not in pattern:
        return ""
    return next((_REASONS[match.lastgroup] for match in _REFUSED.finditer(pattern) if match.lastgroup), "")


def from_ecma(pattern: str) -> str:
    """Translate ``pattern``, whose escapes and classes mean something else in llguidance.

    What neither knows is left as it is, for llguidance to refuse by name.
    """
    if not _DIFFERS.search(pattern):
        return pattern
    result: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            text, at = _escape(pattern, at, in_class=False)
            result.append(text)
        elif char == "[":
            text, at = _class(pattern, at)
            result.append(text)
        elif char == "{" and (match := _QUANTIFIER.match(pattern, at)) and result:
            result.append(match[0])
            at = match.end()
        else:
            result.append(_ANY if char == "." else f"\\{char}" if char in _SPECIAL else char)
            at += 1
    return "".join(result)


#: What may be spelled alike and mean something else.
_DIFFERS = re.compile(r"[\\\[\].{}]")


def _escape(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """The escape at ``at``, and the position after it."""
    if at + 1 == len(pattern):
        return "\\", at + 1
    char = pattern[at + 1]
    if char in _CLASSES:
        return (_CLASSES[char] if in_class else f"[{_CLASSES[char]}]"), at + 2
    if char in _CONTROLS and not (char == "0" and pattern[at + 2 : at + 3].isdigit()):
        return _CONTROLS[char], at + 2
    if in_class and char == "b":
        return r"\x08", at + 2
    if not in_class and char in _ANCHORS:
        return _ANCHORS[char], at + 2
    if match := _CODE.match(pattern, at + 1):
        return _code(pattern, match)
    if match := _PROPERTY.match(pattern, at + 1):
        return f"\\{match[0]}", match.end()
    if char.isalnum():  # a word boundary, a reference back, or nothing
        return f"\\{char}", at + 2
    return (f"\\{char}" if char.isascii() and char.isprintable() and char != " " else char), at + 2


def _code(pattern: str, match: re.Match[str]) -> tuple[str, int]:
    """A character by its number, and the position after it."""
    end = match.end()
    if match[4]:
        return f"\\x{{{ord(match[4]) % 32:X}}}", end
    code = int(match[1] or match[2] or match[3], 16)
    if match[2] and 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(pattern, end)):
        code, end = 0x10000 + ((code & 0x3FF) << 10) + (int(low[1], 16) & 0x3FF), low.end()
    return f"\\x{{{code:X}}}", end


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The class in brackets at ``at``, and the position after it."""
    at += 1
    is_negated = pattern.startswith("^", at)
    at += is_negated
    parts: list[str] = []
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "\\":
            text, at = _escape(pattern, at, in_class=True)
            parts.append(text)
            continue
        is_range = pattern[at] == "-" and parts and pattern[at + 1 : at + 2] not in ("", "]")
        parts.append("-" if is_range else f"\\{pattern[at]}" if pattern[at] in _SPECIAL_IN_CLASS else pattern[at])
        at += 1
    if at == len(pattern):
        return pattern, at  # not closed: refused
    if not parts:
        return (r"[\x{0}-\x{10FFFF}]" if is_negated else r"[^\x{0}-\x{10FFFF}]"), at + 1
    return f"[{'^' if is_negated else ''}{''.join(parts)}]", at + 1


#: Parts of patterns in the language of llguidance that Python's ``regex`` spells differently, and classes.
_NOT_PYTHON = re.compile(r"\\x\{([0-9A-Fa-f]+)\}|(\$)|\[(?:\\.|[^\]\\])*\]|\\.", re.DOTALL)
_CODE_POINT = re.compile(r"\\x\{([0-9A-Fa-f]+)\}|\\.", re.DOTALL)


def to_python(pattern: str) -> str:
    """Translate ``pattern`` from the language of llguidance to that of the library ``regex``."""

    def character(match: re.Match[str]) -> str:
        return f"\\U{int(match[1], 16):08X}" if match[1] else match[0]

    def part(match: re.Match[str]) -> str:
        if match[2]:
            return r"\Z"
        return _CODE_POINT.sub(character, match[0])

    return _NOT_PYTHON.sub(part, pattern)
