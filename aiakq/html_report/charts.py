"""Charts as trees of SVG elements, which ``templates/parts.html`` writes.

The style defines the colours: class ``k0`` .. ``k9`` is a series; ``axis``, ``grid`` and ``muted`` as named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: One colour per series, distinguishable on light and dark backgrounds.
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#3aa7a3", "#c9a227", "#9c755f", "#e377a8", "#8c8c96",
)  # fmt: skip
#: Size of a chart in its own units; the page scales it.
WIDTH, HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 24, 40

#: A position on an axis and its label.
Tick = tuple[float, str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Element:
    """One SVG element: its attributes, tooltip, text and children."""

    tag: str
    attributes: dict[str, str]
    title: str = ""
    text: str = ""
    children: tuple[Element, ...] = ()


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


@dataclass(frozen=True)
class Curve:
    """A line through ``points``, and labelled points of their own.

    dots  (point, tooltip).
    """

    name: str
    points: Sequence[Point]
    dots: Sequence[tuple[Point, str]] = ()


def bars(blocks: Sequence[BlockMarks], unit: str) -> Element:
    """One bar per mark from zero, with a thin whisker up to ``other``; the axis is in percent of ``unit``."""
    top = max((max(mark.value, mark.other or 0.0) for block in blocks for mark in block.marks), default=0.0)
    values, step = _ticks(top)
    y = _scale(0.0, values[-1], HEIGHT - _BOTTOM, _TOP)

    def draw(mark: Mark, x: float, width: float) -> list[Element]:
        height = max(y(0) - y(mark.value), 0.5)
        drawn = [_element("rect", x=x, y=y(0) - height, width=width, height=height)]
        if mark.other is not None and mark.other > mark.value:
            drawn.append(_vertical(x + width / 2, y(mark.value), y(mark.other)))
        return drawn

    return _by_block(blocks, [(y(value), _percent(value, step)) for value in values], draw, unit)


def dumbbells(blocks: Sequence[BlockMarks], unit: str) -> Element:
    """A ring at ``other`` and a dot at ``value`` for every mark, connected by a line, on a logarithmic axis."""
    every = [mark for block in blocks for mark in block.marks]
    values = [value for mark in every for value in (mark.value, mark.other) if value is not None and value > 0]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    ticks = _log_ticks(low, high)
    low, high = min(low, ticks[0][0]), max(high, ticks[-1][0])
    scale = _scale(math.log(low), math.log(high), HEIGHT - _BOTTOM, _TOP)

    def draw(mark: Mark, x: float, width: float) -> list[Element]:
        middle, radius = x + width / 2, max(1.5, min(4.0, width / 2))
        after, before = (
            scale(math.log(value)) if value is not None and value > 0 else None for value in (mark.value, mark.other)
        )
        drawn = []
        if after is not None and before is not None:
            drawn.append(_vertical(middle, before, after))
        if before is not None:
            drawn.append(_element("circle", "ring", cx=middle, cy=before, r=radius))
        if after is not None:
            drawn.append(_element("circle", cx=middle, cy=after, r=radius))
        return drawn

    return _by_block(blocks, [(scale(math.log(value)), label) for value, label in ticks], draw, unit)


def lines(curves: Sequence[Curve], x_name: str, y_name: str) -> Element | None:
    """A line chart with both axes from 0; None if no curve has a point."""
    points = [point for curve in curves for point in (*curve.points, *(point for point, _ in curve.dots))]
    if not points:
        return None
    (x_values, _), (y_values, _) = (_ticks(max(point[axis] for point in points)) for axis in (0, 1))
    x, y = _scale(0.0, x_values[-1], _LEFT, WIDTH - 30), _scale(0.0, y_values[-1], HEIGHT - _BOTTOM, _TOP)
    drawn = _grid([(y(value), _label(value)) for value in y_values])
    drawn += [_text(x(value), HEIGHT - _BOTTOM + 17, _label(value), "middle") for value in x_values]
    drawn += [_text(WIDTH - 30, HEIGHT - 6, x_name, "end"), _text(2, _TOP - 10, y_name)]
    for number, curve in enumerate(curves):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve.points)
        dots = tuple(_element("circle", title=title, cx=x(a), cy=y(b), r=4) for (a, b), title in curve.dots)
        line = Element("polyline", {"class": "curve", "points": path})
        drawn.append(Element("g", {"class": f"k{number % len(COLOURS)}"}, children=(line, *dots)))
    return _svg(drawn, f"{y_name} against {x_name}: {', '.join(curve.name for curve in curves)}")


def _by_block(
    blocks: Sequence[BlockMarks],
    ticks: Iterable[Tick],
    draw: Callable[[Mark, float, float], list[Element]],
    unit: str,
) -> Element:
    """Draw the grid, labels of blocks, and all marks, block after block; ``draw`` gets a mark, its left and width."""
    drawn = _grid(ticks)
    # Leave a gap one mark wide between blocks, and limit the width of marks.
    slots = sum(len(block.marks) + 1 for block in blocks) or 1
    slot = (WIDTH - _LEFT - _RIGHT) / slots
    width = min(slot * 0.84, 26.0)
    every = max(1, math.ceil(len(blocks) / 24))
    x = _LEFT + slot / 2
    for number, block in enumerate(blocks):
        if number % every == 0:
            drawn.append(_text(x + slot * len(block.marks) / 2, HEIGHT - _BOTTOM + 17, block.label, "middle"))
        for mark in block.marks:
            parts = tuple(draw(mark, x + (slot - width) / 2, width))
            drawn.append(Element("g", {"class": f"k{mark.kind % len(COLOURS)}"}, mark.title, children=parts))
            x += slot
        x += slot
    drawn.append(Element("path", {"class": "axis", "d": f"M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"}))
    drawn.append(_text((WIDTH + _LEFT) / 2, HEIGHT - 5, "block", "middle", "muted"))
    return _svg(drawn, unit)


def _svg(drawn: Sequence[Element], label: str) -> Element:
    attributes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": label}
    return Element("svg", attributes, children=tuple(drawn))


def _grid(ticks: Iterable[Tick]) -> list[Element]:
    """Horizontal lines at the positions of ``ticks``, with their labels at the left."""
    drawn = []
    for position, label in ticks:
        drawn.append(Element("path", {"class": "grid", "d": f"M{_LEFT} {position:.2f}H{WIDTH - _RIGHT}"}))
        drawn.append(_text(_LEFT - 7, position + 4, label, "end"))
    return drawn


def _element(tag: str, kind: str = "", title: str = "", **numbers: float) -> Element:
    attributes = {"class": kind} if kind else {}
    return Element(tag, {**attributes, **{name: f"{value:.2f}" for name, value in numbers.items()}}, title)


def _vertical(x: float, start: float, end: float) -> Element:
    return Element("path", {"class": "line", "d": f"M{x:.2f} {start:.2f}V{end:.2f}"})


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> Element:
    attributes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor}
    return Element("text", attributes | ({"class": kind} if kind else {}), text=text)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map of ``low`` to ``start`` and ``high`` to ``end``."""
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _ticks(high: float) -> tuple[list[float], float]:
    """Return ticks from 0 to at least ``high``, four or five steps of 1, 2 or 5 times a power of ten, and the step."""
    high = high if high > 0 else 1.0
    step = _round_up(high / 4)
    return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)], step


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is at least ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _label(value: float) -> str:
    """Format a tick label, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step * 100) + 1e-9))
    return f"{value * 100:.{digits}f} %"


def _log_ticks(low: float, high: float) -> list[Tick]:
    """Return ticks for a range: 1, 2, 5 of every power of ten if it is short, else powers of ten, about six at most."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5)]
        below = max((v for v in ticks if v <= low * (1 + 1e-9)), default=ticks[0])
        above = min((v for v in ticks if v >= high * (1 - 1e-9)), default=ticks[-1])
        return [(v, f"{v:g}") for v in ticks if below <= v <= above]
    every = math.ceil((last - first) / 6)
    return [(10.0**power, f"{10.0**power:g}") for power in range(first, last + every, every)]
