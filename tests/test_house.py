"""The house rules: imports go one way, nothing heavy loads early, every module imports, files stay readable."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("aiakq/**/*.py"), *ROOT.glob("kernels/**/*.py")])

#: Layers, highest first. A module may import from its own layer and from layers below it.
ROWS = [
    {"aiakq", "aiakq.cli", "aiakq.terminal", "aiakq.__main__"},
    {"aiakq.server", "aiakq.bench", "aiakq.quantizers"},
    {"aiakq.evaluation"},
    {"aiakq.runtime", "aiakq.data"},
    {"aiakq.formats"},
    {"aiakq.registry"},
    {"aiakq.kernels"},
    {"aiakq.arguments", "aiakq.system", "aiakq.spec", "aiakq.patterns", "aiakq.errors", "aiakq.__version__"},
]
STANDARD_ONLY = ("aiakq.spec", "aiakq.errors", "aiakq.arguments", "aiakq.system")
NO_TORCH = ("aiakq.runtime.engine",)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "aiakq")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def row_of(module: str) -> int:
    """The row of the longest name that is ``module`` or holds it."""
    best = max(
        ((name, row) for row, names in enumerate(ROWS) for name in names if (module + ".").startswith(name + ".")),
        key=lambda found: len(found[0]),
    )
    return best[1]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            # "from aiakq import formats" names a module too.
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "aiakq")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path):
    own = module_name(path)
    for name in imported(path):
        if name.startswith("aiakq."):
            assert row_of(own) <= row_of(name), f"{own} may not import {name}"
    if (own + ".").startswith(tuple(f"{name}." for name in STANDARD_ONLY)):
        outside = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"aiakq"}
        assert not outside, f"{own} is standard library only, but imports {outside}"
    if own.startswith("aiakq.kernels"):
        assert not {name for name in imported(path) if name.startswith("aiakq") and ".kernels" not in name}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_imports_and_says_what_it_is(path):
    module = importlib.import_module(module_name(path))
    if path.read_text().strip():
        assert module.__doc__, "a module opens with what it is for"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_the_console_prints(path):
    if module_name(path) in ("aiakq.cli", "aiakq.terminal.console"):
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_importing_aiakq_loads_nothing_heavy():
    code = (
        "import sys, aiakq, aiakq.cli, aiakq.spec, aiakq.errors, aiakq.arguments.server; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_in_pyproject_are_all_there_are():
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {module_name(path) for path in SOURCES if path.name == "__init__.py"}
    assert set(listed) == found


def test_nothing_heavy_is_a_file_nobody_asked_for():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    big = [
        name
        for name in done.stdout.split("\0")
        if name and (ROOT / name).is_file() and (ROOT / name).stat().st_size > 2**20
    ]
    assert set(big) <= {"examples/tinybooks/model.safetensors"}
