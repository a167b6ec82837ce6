"""The Kustomize base: its output matches Kubernetes' schemas, and its probes and timeouts fit the server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from aiakq.arguments.server import ARGUMENTS, checked
from aiakq.server.api.routes import keyless_paths, load_routes

FOLDER = Path(__file__).parents[3] / "examples" / "deploy" / "kubernetes"
OPTIONS = checked({"model": "m"}, server=True)


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, Any]]:
    """What kustomize makes of the base, by kind."""
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, str(FOLDER)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    pytest.skip("neither kubectl nor kustomize is installed")


def test_the_schemas_of_kubernetes_accept_it(rendered):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in rendered.values():
        validate.validate(document, "1.30", strict=True)


def test_every_selector_names_the_pods(rendered):
    labels = rendered["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        rendered["Deployment"]["spec"]["selector"]["matchLabels"],
        rendered["Service"]["spec"]["selector"],
        rendered["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        rendered["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        yaml.safe_load((FOLDER / "monitoring" / "pod-monitor.yaml").read_text())["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_probes_ask_routes_that_need_no_key(rendered):
    [container] = rendered["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert set(paths.values()) <= keyless_paths(load_routes(OPTIONS), OPTIONS)
    assert paths["livenessProbe"] == "/live" != paths["readinessProbe"], "loading is no reason for a restart"


def test_a_pod_may_finish_its_requests(rendered):
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep + OPTIONS.shutdown_timeout


def test_a_pod_has_no_privilege_and_the_options_exist(rendered):
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    known = {row.long_flag for row in ARGUMENTS}
    assert {word for word in container["args"] if word.startswith("--")} <= known
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
