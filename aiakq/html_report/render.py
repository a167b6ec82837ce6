"""Renders a report from its template. Every value is escaped; names that a template uses have to be given."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from aiakq.html_report.charts import COLOURS
from aiakq.html_report.numbers import duration, figure, percent, size

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """Return a page. Equal values give equal pages.

    template  name of a file in ``templates``.
    values    what the template uses.
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("aiakq.html_report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "size": size, "duration": duration, "figure": figure}
    environment.globals["colours"] = COLOURS
    return environment
