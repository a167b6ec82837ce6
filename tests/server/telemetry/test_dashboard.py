"""docs/grafana.json and the alerts: every query uses names, labels and label values that the server exports."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "examples" / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
# Prometheus itself adds the series and the labels of what it scrapes.
QUERIES += [
    (rule["alert"], re.sub(r"\binstance, ", "", rule["expr"]))
    for group in ALERTS["groups"]
    for rule in group["rules"]
    if not rule["expr"].startswith("up{")
]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
_SERIES = re.compile(r"(\w+:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|=|!=|!~)"([^"]*)"')


@pytest.fixture(scope="module")
def exported(server) -> dict[str, dict[str, set[str]]]:
    """Sample name -> label -> values, of a server's /metrics."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", trust_env=False).text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
    return found


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}: {at}" for at, (title, _) in enumerate(QUERIES)])
def test_every_dashboard_query_uses_exported_metrics(exported, title, query):
    asked = _SERIES.findall(query)
    assert asked and query.count("(") == query.count(")")
    for name, selector in asked:
        assert name in exported, f"{title} asks for {name}"
        matchers = _MATCHER.findall(selector)
        assert ",".join(f'{label}{sign}"{value}"' for label, sign, value in matchers) == selector
        for label, sign, value in matchers:
            assert label in exported[name], f"{title}: {name} has no label {label}"
            if value.startswith("$"):
                assert value[1:] in VARIABLES and sign == "=~"
            else:
                assert value in exported[name][label], f"{title}: {name} has no {label}={value}"
    for grouped in re.findall(r"by \(([^)]*)\)", query):
        for label in re.split(r",\s*", grouped):
            assert all(label in exported[name] for name, _ in asked), f"{title} groups by {label}"
    for name, _ in asked:  # rates are of what only grows, quantiles of buckets
        if name.endswith("_bucket"):
            assert ("histogram_quantile(" in query or "le=" in query) and "le" in exported[name]


def test_dashboard_variables_have_values(exported):
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", VARIABLES["model"]["query"]).groups()
    assert exported[name][label] == {"tinybooks"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD))) - {"__rate_interval", "__all"}
    assert used == set(VARIABLES)


def test_dashboard_panels_do_not_overlap():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in BOARD["panels"]}) == len(places)
