"""Charts of any numbers, and the figures of reports."""

from xml.etree import ElementTree

import pytest

from aiakq.html_report.charts import HEIGHT, WIDTH, BlockMarks, Curve, Element, Mark, bars, dumbbells, lines
from aiakq.html_report.numbers import duration, figure, percent, size
from aiakq.html_report.render import render

EVIL = "<script>alert('\"&`')</script>"


@pytest.fixture
def svg():
    """Return the parsed SVG of a chart, as a page contains it."""

    def parse(chart: Element) -> ElementTree.Element:
        figures = [{"names": [EVIL], "chart": chart}]
        section = {"title": EVIL, "figures": figures, "note": EVIL}
        lists = {name: [] for name in ("warnings", "head", "results", "settings")}
        page = render("bench.html", title=EVIL, subtitle=EVIL, sections=[section], **lists)
        assert "<script" not in page
        start, end = page.index("<svg"), page.index("</svg>")
        return ElementTree.fromstring(page[start : end + len("</svg>")])

    return parse


NUMBERS = [[0.0], [1e-12, 1e12], [0.003, 0.004], [5.0], [0.999, 1.0, 1.001], []]


@pytest.mark.parametrize("values", NUMBERS, ids=str)
def test_marks_of_any_numbers_are_inside_the_chart(values, svg):
    blocks = [BlockMarks(str(i), (Mark(i, f"{value}", value, value * 2),)) for i, value in enumerate(values)]
    for chart in (bars(blocks, "error"), dumbbells(blocks, "range")):
        for element in svg(chart).iter():
            for key in ("y", "cy"):
                if key in element.attrib and element.tag != "text":
                    assert -1 <= float(element.attrib[key]) <= HEIGHT + 1


@pytest.mark.parametrize("values", [values for values in NUMBERS if values], ids=str)
def test_curves_of_any_numbers_are_inside_the_chart(values, svg):
    points = [(value, value) for value in values]
    root = svg(lines([Curve(EVIL, points, [(point, EVIL) for point in points])], EVIL, EVIL))
    line = next(element for element in root.iter("polyline"))
    for point in line.attrib["points"].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert len(list(root.iter("circle"))) == len(values)
    assert next(root.iter("title")).text == EVIL


def test_curves_without_points_give_no_chart():
    assert lines([Curve("none", [])], "x", "y") is None


def test_formatting_of_numbers():
    assert [size(n) for n in (0, 999, 1000, 11_540_992, 4e12)] == ["0 bytes", "999 bytes", "1 kB", "11.5 MB", "4 TB"]
    assert [percent(n) for n in (0.0, 0.00123, 0.0123, 0.5)] == ["0.000%", "0.123%", "1.23%", "50.0%"]
    assert [duration(n) for n in (1.234, 99, 754, 7260)] == ["1.23 s", "99 s", "12 min 34 s", "2 h 1 min"]
    assert [figure(cell) for cell in (None, 12345.678, 7, "a")] == ["–", "1.235e+04", "7", "a"]
