"""The example plugin, installed into a folder of its own, and processes that find it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("aiakq_example_plugin")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory) -> Path:
    """The package as ``pip install --target`` would install it, built by its own pyproject.toml without a network."""
    work, target = tmp_path_factory.mktemp("plugin-source"), tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, work, dirs_exist_ok=True)
    code = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(work)]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(work / done.stdout.split()[-1]) as wheel:
        wheel.extractall(target)
    return target


@pytest.fixture(scope="session")
def run(plugin_folder) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(*words, **environment)`` runs ``python words`` with the plugin installed; it must succeed."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(plugin_folder), **environment}
        command = [sys.executable, "-P", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def run_tests(run) -> Callable[..., int]:
    """``run_tests(*words)`` runs pytest with the plugin installed; returns how many tests passed. None may fail."""

    def run_tests(*words: object) -> int:
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
        passed = [word for word in done.stdout.splitlines()[-1].split(",") if "passed" in word]
        return int(passed[0].split()[0])

    return run_tests
