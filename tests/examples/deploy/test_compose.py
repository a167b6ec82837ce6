"""The Compose file: mounted files and options exist, and the server has time to drain."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from other_programs import check_schema

from aiakq.arguments.environment import unknown_variables
from aiakq.arguments.server import checked

FOLDER = Path(__file__).parents[3] / "examples" / "deploy" / "compose"
FILE = FOLDER / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def test_the_schema_of_compose_accepts_it():
    check_schema("vendor.compose-spec", FILE)


def test_what_is_mounted_exists():
    for service in ("prometheus", "grafana"):
        sources = [mount.split(":")[0] for mount in SERVICES[service]["volumes"]]
        files = [FOLDER / source for source in sources if source.startswith(".")]
        assert files and all(file.is_file() for file in files)
    build = SERVICES["aiakq"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_the_server_has_no_privilege_and_time_to_drain():
    server = SERVICES["aiakq"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and not server["user"].startswith("0")
    assert int(server["stop_grace_period"].rstrip("s")) > checked({"model": "m"}, server=True).shutdown_timeout
    assert unknown_variables(server["environment"]) == []


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus():
    scraped = yaml.safe_load((FOLDER.parent / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["aiakq:8000"]
    [source] = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert any(f":{folder}/" in mount for mount in SERVICES["grafana"]["volumes"])
    json.loads((FOLDER / "../../../docs/grafana.json").read_text())
