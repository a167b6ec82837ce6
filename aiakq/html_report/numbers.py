"""Numbers in reports: percentages, sizes and durations with three or four significant digits."""

from __future__ import annotations


def percent(value: float | None) -> str:
    """Format a fraction as a percentage with three significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.3%}" if value < 0.01 else f"{value:.2%}" if value < 0.1 else f"{value:.1%}"


def size(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Format a duration: 1.23 s, 12 min 34 s, 2 h 1 min."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def figure(value: object) -> str:
    """Format a cell of a table: floats with four digits, None as a dash."""
    return "–" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
