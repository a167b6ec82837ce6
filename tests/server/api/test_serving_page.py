"""docs/serving.md and docs/routes.md describe what the server does."""

from __future__ import annotations

import re
from pathlib import Path

from aiakq.server.api.unsupported_fields import IGNORED_FIELDS
from aiakq.server.process.request_stream import MAX_PROMPTS, MAX_SEQUENCES
from aiakq.server.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "serving.md").read_text(encoding="utf-8")
ROUTES = (DOCS / "routes.md").read_text(encoding="utf-8")


def test_every_route_is_listed(http):
    served = http.get("/openapi.json").json()["paths"]
    assert served
    for route in served:
        assert f"{route}`" in ROUTES, route


def test_every_metric_is_listed():
    families = {family.name for family in Metrics("m", 100, {"a": "b"}).registry.collect()}
    named = set(re.findall(r"`([a-z0-9_]+)(?:\{[a-z_, ]+\})?`", PAGE))
    for family in families:
        name = family.rpartition(":")[2]
        assert {name, f"{name}_total"} & named, name


def test_fields_without_effect_are_listed():
    for name in IGNORED_FIELDS:
        assert f"`{name}`" in PAGE, name
    assert f"at most {MAX_PROMPTS} prompts" in PAGE and f"{MAX_SEQUENCES} sequences" in PAGE
