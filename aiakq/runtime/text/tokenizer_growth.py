"""Limit how much longer than its input a tokenizer's normalizer or decoder may make a text."""

from __future__ import annotations

import math

#: Maximum factor by which a decoder or normalizer may lengthen a text.
MAX_GROWTH = 16


def growth_of(part: object) -> float:
    """Return the factor by which a normalizer of tokenizer.json lengthens a short text."""
    if not isinstance(part, dict):
        return 1.0
    pattern = part.get("pattern")
    replaced = len(pattern.get("String") or " ") if isinstance(pattern, dict) else 1
    growth = max(1.0, len(part.get("content") or "") / replaced, len(part.get("prepend") or "") / MAX_GROWTH)
    return growth * math.prod(growth_of(each) for each in part.get("normalizers") or [])


def check_decoder(decoder: object) -> None:
    """Raise ValueError for a decoder of tokenizer.json whose time or output is not bounded by its input."""
    growth, left = 1.0, [decoder]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        left += part.get("decoders") or []
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and "Regex" in pattern:
            raise ValueError("its decoder has a regular expression, which can take any time")
        if isinstance(pattern, dict):
            growth *= max(1.0, len(part.get("content") or "") / max(1, len(pattern.get("String") or "")))
    if growth > MAX_GROWTH:
        raise ValueError(f"its decoder makes texts more than {MAX_GROWTH} times longer")
