"""``repetition_detection``: ends a text that repeats itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from aiakq.errors import error

#: Fields of ``repetition_detection``, and the largest pattern and the largest count, which bound the time per token.
REPETITION_FIELDS = ("max_pattern_size", "min_pattern_size", "min_count")
MAX_PATTERN_SIZE, MAX_PATTERN_COUNT = 256, 256


@dataclass
class RepetitionDetectionParams:
    """vLLM's class for ``SamplingParams.repetition_detection``."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


def checked_repetition(given: object) -> dict[str, int]:
    """Return ``repetition_detection`` as a dict. Raises ``value_out_of_range`` and ``invalid_type``."""
    if isinstance(given, RepetitionDetectionParams):
        given = asdict(given)
    if not isinstance(given, dict) or not all(type(value) is int for value in given.values()):
        reason = "an object with " + ", ".join(REPETITION_FIELDS) + " is expected"
        raise error("invalid_type", param="repetition_detection", reason=reason)
    for name in given:
        if name not in REPETITION_FIELDS:
            hint = f"Known: {', '.join(REPETITION_FIELDS)}."
            raise error("unknown_field", param=f"repetition_detection.{name!s:.64}", hint=hint)
    least, most = given.get("min_pattern_size", 0), given.get("max_pattern_size", 0)
    bounds = {
        "max_pattern_size": (most, 0, MAX_PATTERN_SIZE),
        "min_pattern_size": (least, 0, most),
        "min_count": (given.get("min_count", 0), 2 if most else 0, MAX_PATTERN_COUNT),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            allowed = f"{low} to {high}"
            raise error("value_out_of_range", param=f"repetition_detection.{name}", value=value, allowed=allowed)
    return given
