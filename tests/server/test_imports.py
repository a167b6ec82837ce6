"""The packages of the server import each other in one direction, as aiakq/server/__init__.py says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aiakq.server

#: Highest layer first; packages of one layer do not import each other. Other modules, like launch.py, are above them.
LAYERS = [("api",), ("http", "process"), ("telemetry", "errors")]
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
FOLDER = Path(aiakq.server.__file__).parent
MODULES = {path.relative_to(FOLDER).with_suffix("").parts: path for path in FOLDER.rglob("*.py")}


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module, given by its name's parts below aiakq.server; "" for modules above the packages."""
    return parts[0] if parts[0] in LAYER_OF else ""


def server_imports(path: Path) -> set[tuple[str, ...]]:
    """The modules of the server that a file imports, at any depth, also for types only."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [tuple((node.module or "").split(".")) for node in nodes]
    return {name[2:] for name in names if name[:2] == ("aiakq", "server") and len(name) > 2}


@pytest.mark.parametrize("parts", MODULES, ids="/".join)
def test_imports_go_to_lower_layers_only(parts):
    package = package_of(parts)
    for other in server_imports(MODULES[parts]):
        target = package_of(other)
        assert package == target or LAYER_OF.get(package, -1) < LAYER_OF.get(target, -1), f"imports {'.'.join(other)}"


@pytest.mark.parametrize("module", ["aiakq.server.launch", "aiakq.server.process.text_process"])
def test_starting_imports_nothing_that_few_requests_need(module):
    """Each of these takes time at every start, and memory in every process."""
    late = ["torch", "regex", *(["urllib.request", "ssl"] if module.endswith("text_process") else [])]
    code = f"import sys, {module}; print(*[name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
