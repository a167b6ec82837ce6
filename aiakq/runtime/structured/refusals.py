"""Why grammars cannot be enforced, in one line: what llguidance says, without its dumps of grammars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from aiakq.runtime.structured.ecma_patterns import from_ecma
from aiakq.runtime.structured.schema_documents import MAPS_OF_SCHEMAS

#: Maximum number of characters of a reason, and of a pattern in it.
MAX_REASON, _MAX_PATTERN = 300, 100
#: Maximum number of patterns that are checked to find the one that is refused.
_MAX_PATTERNS = 64
#: Reasons of llguidance that are only names.
_STOP_REASONS = {"NoExtensionBias": "no text matches it", "NoExtension": "no text matches it"}
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_INVALID = re.compile(r'^invalid regex "(.*)" \(in regex\)$')
_DUMP = re.compile(r"^ *\d+ \| |^ *\^+ *$")


def reason_of(failure: str) -> str:
    """What llguidance says, in one line: its first one, and the ones that explain errors of regular expressions."""
    lines = [line for line in failure.strip().splitlines() if line.strip() and not _DUMP.match(line)]
    if not lines:
        return "no reason given" if failure else ""
    first = _POSITION.sub("", lines[0].strip()).removeprefix("failed to compile JSON schema: ")
    first = _STOP_REASONS.get(first, first)
    if "Regex is empty" in first:
        first = "no string matches all of its pattern, format and length"
    first, is_parse_error = first.removesuffix("regex parse error:").rstrip(": "), "regex parse error" in first
    wrong = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    if match := _INVALID.match(first):
        first = f"the regular expression {shortened(match[1])} is not supported"
    elif is_parse_error and not first:
        first = "a regular expression is not supported"
    return ": ".join([first, *wrong]).rstrip(".:")[:MAX_REASON]


def shortened(pattern: str) -> str:
    """``pattern`` in quotes, cut if it is long."""
    text = pattern if len(pattern) <= _MAX_PATTERN else f"{pattern[:_MAX_PATTERN]}..."
    return f"'{text}'" if text.isprintable() else ascii(text)


def refused_pattern(schemas: list[object], failure_of: Callable[[str], str]) -> str:
    """The first pattern in JSON ``schemas`` that cannot be enforced, its place and why; empty if there is none.

    failure_of  why a regular expression of llguidance cannot be compiled; empty if it can.
    """
    checked = 0
    for root in schemas:
        for place, pattern in patterns_of(root):
            checked += 1
            if checked > _MAX_PATTERNS:
                return ""
            if failure := failure_of(from_ecma(pattern)):
                why = next((line.removeprefix("error: ") for line in failure.splitlines() if "error: " in line), "")
                return f"the pattern {shortened(pattern)} at {place} is not supported{f': {why}' if why else ''}"
    return ""


def place_of(root: object, pattern: str) -> str:
    """Where ``pattern`` is in the JSON schema ``root``; empty if it is not there."""
    return next((place for place, each in patterns_of(root) if each == pattern), "")


def patterns_of(root: object) -> Iterator[tuple[str, str]]:
    """The place and text of each pattern in a JSON schema."""
    pending: list[tuple[str, object, bool]] = [("", root, False)]
    while pending:
        place, value, is_map = pending.pop()
        inner = f"{place}." if place else ""
        if isinstance(value, list):
            pending += [(f"{place}[{at}]", each, False) for at, each in reversed(list(enumerate(value)))]
        elif isinstance(value, dict):
            if not is_map and isinstance(value.get("pattern"), str):
                yield f"{inner}pattern"[-_MAX_PATTERN:], value["pattern"]
            if not is_map and isinstance(value.get("patternProperties"), dict):
                for name in value["patternProperties"]:
                    yield f"{inner}patternProperties"[-_MAX_PATTERN:], name
            children = [
                (f"{inner}{name:.64}", each, not is_map and name in MAPS_OF_SCHEMAS) for name, each in value.items()
            ]
            skipped = () if is_map else ("enum", "const", "default", "examples")
            pending += [
                child for child, name in reversed(list(zip(children, value, strict=True))) if name not in skipped
            ]
