"""The systemd unit, checked by systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aiakq.arguments.server import ARGUMENTS, checked
from aiakq.errors.kind import WORKER

FOLDER = Path(__file__).parents[3] / "examples" / "deploy" / "systemd"
UNIT = (FOLDER / "aiakq.service").read_text()


@pytest.fixture
def unit(tmp_path) -> Path:
    """The unit with a program that is here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "aiakq.service"
    path.write_text(UNIT.replace("/opt/aiakq/bin/aiakq", sys.executable))
    return path


def test_systemd_finds_nothing_wrong(unit):
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and str(unit.name) not in done.stderr, done.stderr


def test_the_service_is_confined(unit):
    done = subprocess.run(["systemd-analyze", "security", "--offline=yes", str(unit)], capture_output=True, text=True)
    found = re.search(r"exposure level for aiakq.service: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip("this systemd-analyze looks at running services only")
    assert float(found[1]) <= 2.0


def test_options_exist_and_the_drain_fits():
    known = {row.long_flag for row in ARGUMENTS} | {"--config"}
    assert set(re.findall(r"(--[\w-]+)", re.search(r"^ExecStart=.*$", UNIT, re.M)[0])) <= known
    assert int(re.search(r"TimeoutStopSec=(\d+)", UNIT)[1]) > checked({"model": "m"}, server=True).shutdown_timeout
    options = yaml.safe_load((FOLDER / "serve.yaml").read_text())
    assert {f"--{name}" for name in options} <= known
    assert "Restart=on-failure" in UNIT and f"Exit code {WORKER} " in UNIT
