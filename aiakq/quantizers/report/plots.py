"""Plots as inline SVG: bars and before/after values per block.

Colours are defined by the page: class ``k0`` .. ``k9`` is a kind of layer; ``axis``, ``grid`` and ``muted`` as named.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Size of the drawing in its own units; the page scales it.
WIDTH, HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 12, 40
KINDS = 10


@dataclass(frozen=True)
class Mark:
    """One layer of a block: its kind, its tooltip, and its numbers.

    value  end of a bar, or the value after.
    other  end of a bar's whisker, or the value before; None if there is none.
    """

    kind: int
    title: str
    value: float
    other: float | None = None


@dataclass(frozen=True)
class BlockMarks:
    """The marks of one block, in the order of the model."""

    label: str
    marks: tuple[Mark, ...]


def bars(blocks: Sequence[BlockMarks], unit: str) -> str:
    """One bar per mark from zero, with a thin whisker up to ``other``; the axis is in percent of ``unit``."""
    top = max((max(mark.value, mark.other or 0.0) for block in blocks for mark in block.marks), default=0.0) or 1.0
    step = _round_up(top / 4)
    top = math.ceil(top / step - 1e-9) * step

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    ticks = [(number * step, _percent(number * step, step)) for number in range(round(top / step) + 1)]

    def draw(mark: Mark, x: float, width: float) -> str:
        height = max(y(0) - y(mark.value), 0.5)
        bar = f'<rect x="{x:.2f}" y="{y(0) - height:.2f}" width="{width:.2f}" height="{height:.2f}"/>'
        if mark.other is not None and mark.other > mark.value:
            middle = x + width / 2
            bar += f'<path class="line" d="M{middle:.2f} {y(mark.value):.2f}V{y(mark.other):.2f}"/>'
        return f'<g class="k{mark.kind % KINDS}"><title>{html.escape(mark.title)}</title>{bar}</g>'

    return _frame(blocks, ticks, y, draw, unit)


def dumbbells(blocks: Sequence[BlockMarks], unit: str) -> str:
    """A ring at ``other`` and a dot at ``value`` for every mark, connected by a line, on a logarithmic axis."""
    values = [
        v for block in blocks for mark in block.marks for v in (mark.value, mark.other) if v is not None and v > 0
    ]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    ticks = _log_ticks(low, high)
    low, high = min(low, ticks[0][0]), max(high, ticks[-1][0])
    span = math.log(high / low) or 1.0

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - math.log(value / low) / span * (HEIGHT - _TOP - _BOTTOM)

    def draw(mark: Mark, x: float, width: float) -> str:
        middle, radius = x + width / 2, max(1.5, min(4.0, width / 2))
        parts = [f"<title>{html.escape(mark.title)}</title>"]
        after = mark.value if mark.value > 0 else None
        before = mark.other if mark.other is not None and mark.other > 0 else None
        if after is not None and before is not None:
            parts.append(f'<path class="line" d="M{middle:.2f} {y(before):.2f}V{y(after):.2f}"/>')
        if before is not None:
            parts.append(f'<circle class="ring" cx="{middle:.2f}" cy="{y(before):.2f}" r="{radius:.2f}"/>')
        if after is not None:
            parts.append(f'<circle cx="{middle:.2f}" cy="{y(after):.2f}" r="{radius:.2f}"/>')
        return f'<g class="k{mark.kind % KINDS}">{"".join(parts)}</g>'

    return _frame(blocks, ticks, y, draw, unit)


def _frame(
    blocks: Sequence[BlockMarks],
    ticks: Iterable[tuple[float, str]],
    y: Callable[[float], float],
    draw: Callable[[Mark, float, float], str],
    unit: str,
) -> str:
    """Draw axes, grid, block labels, and all marks at their positions."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(unit)}">']
    for value, text in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.2f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y(value) + 4:.2f}" text-anchor="end">{html.escape(text)}</text>')
    # Leave a gap one mark wide between blocks, and limit the width of marks.
    slots = sum(len(block.marks) + 1 for block in blocks) or 1
    slot = (WIDTH - _LEFT - _RIGHT) / slots
    width = min(slot * 0.84, 26.0)
    every = max(1, math.ceil(len(blocks) / 24))
    x = _LEFT + slot / 2
    for number, block in enumerate(blocks):
        middle = x + slot * len(block.marks) / 2
        if number % every == 0:
            label = html.escape(block.label)
            parts.append(f'<text x="{middle:.2f}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">{label}</text>')
        for mark in block.marks:
            parts.append(draw(mark, x + (slot - width) / 2, width))
            x += slot
        x += slot
    parts.append(f'<path class="axis" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 5}" text-anchor="middle" class="muted">block</text>')
    parts.append("</svg>")
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is at least ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _percent(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step * 100) + 1e-9))
    return f"{value * 100:.{digits}f} %"


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return ticks for a range: 1, 2, 5 of every power of ten if it is short, else powers of ten, about six at most."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5)]
        below = max((v for v in ticks if v <= low * (1 + 1e-9)), default=ticks[0])
        above = min((v for v in ticks if v >= high * (1 - 1e-9)), default=ticks[-1])
        return [(v, f"{v:g}") for v in ticks if below <= v <= above]
    every = math.ceil((last - first) / 6)
    return [(10.0**power, f"{10.0**power:g}") for power in range(first, last + every, every)]
