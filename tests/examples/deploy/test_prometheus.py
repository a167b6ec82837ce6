"""The alerts and the configuration for Prometheus, checked by promtool."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "examples" / "deploy" / "prometheus"
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def promtool(*words: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_are_raised_when_they_should_be_and_not_otherwise():
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_the_configuration_is_valid():
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "config", "prometheus.yml")


def test_every_alert_is_tested_raised_and_not_raised():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for name in {rule["alert"] for rule in ALERTS}:
        raised = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name}
        assert raised == {True, False}, name


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']} {rule['labels']['severity']}")
def test_an_alert_says_what_is_wrong_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert all(rule["annotations"][name].endswith(".") for name in ("summary", "description"))


def test_prometheus_scrapes_a_server_and_evaluates_the_alerts(serve, free_port, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt install prometheus")
    with serve() as server, httpx.Client(trust_env=False) as client:
        port = free_port()
        client.base_url = f"http://127.0.0.1:{port}"
        text = (FOLDER / "prometheus.yml").read_text().replace("aiakq:8000", server.url.removeprefix("http://"))
        (tmp_path / "prometheus.yml").write_text(text.replace("5s", "1s").replace("11s", "1s"))
        shutil.copy(FOLDER / "alerts.yml", tmp_path)
        options = ["--config.file", "prometheus.yml", "--storage.tsdb.path", "data"]
        command = ["prometheus", *options, "--web.listen-address", f"127.0.0.1:{port}"]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)

        def query(expression: str) -> list[str]:
            with contextlib.suppress(httpx.ConnectError, KeyError):
                answer = client.get("/api/v1/query", params={"query": expression}).json()
                return [row["value"][1] for row in answer["data"]["result"]]
            return []

        try:
            deadline = time.monotonic() + 60
            while query('up{job="aiakq"}') != ["1"] or query("sum(aiakq:build_info)") != ["1"]:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.3)
            while True:
                groups = client.get("/api/v1/rules").json()["data"]["groups"]
                health = {rule["health"] for group in groups for rule in group["rules"]}
                if health == {"ok"}:
                    break
                assert time.monotonic() < deadline and "err" not in health
                time.sleep(0.3)
            assert client.get("/api/v1/alerts").json()["data"]["alerts"] == []
        finally:
            process.terminate()
            process.wait(30)


def test_the_prometheus_operator_scrapes_under_the_name_that_the_alerts_ask_for():
    monitor = yaml.safe_load((FOLDER.parent / "kubernetes" / "monitoring" / "pod-monitor.yaml").read_text())
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels[monitor["spec"]["jobLabel"]] == "aiakq" and 'up{job="aiakq"}' in (FOLDER / "alerts.yml").read_text()
