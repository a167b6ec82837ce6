"""docs/trust.md: every file and test that it names exists, and every name that the code reads from outside is in it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trust.md"
SOURCES = sorted([*ROOT.glob("aiakq/**/*.py"), *ROOT.glob("kernels/**/*.py")])
#: Names of files that a model folder or an input of a command may have.
FILE_NAME = re.compile(
    r"[\w*-]+\.(json|safetensors|bin|model|jinja|txt|tiktoken|pt|pth|yaml|jsonl)|[a-z]+_\*\.py|\*\.py"
)
#: Files that aiakq writes and reads back itself, and Python of its own.
OWN = {"worker.py", "__init__.py", "default.json"}
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{2,}")


@functools.cache
def named() -> frozenset[str]:
    """Return what the page has between backticks."""
    return frozenset(re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")))


@functools.cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]


def strings() -> set[str]:
    """String constants of the code, without docstrings."""
    return {
        node.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def environment_variables() -> set[str]:
    """Names in ``environ.get("X")``, ``environ["X"]``, ``getenv("X")``."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                source, key = ast.unparse(node.func), node.args[0]
            elif isinstance(node, ast.Subscript):
                source, key = ast.unparse(node.value), node.slice
            else:
                continue
            reads = re.search(r"environ(\.(get|pop|setdefault))?$|getenv$", source)
            if reads and isinstance(key, ast.Constant) and VARIABLE.fullmatch(str(key.value)):
                found.add(str(key.value))
    return found


def request_headers() -> set[str]:
    """Names in ``headers.get("x")`` of the server."""
    found = set()
    for path in (ROOT / "aiakq" / "server").glob("**/*.py"):
        found.update(re.findall(r"""headers\.get\(b?"([a-z-]+)\"""", path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("path", sorted(each for each in named() if re.match(r"(aiakq|tests)/", each)))
def test_files_and_tests_of_the_table_exist(path: str) -> None:
    file, _, test = path.partition("::")
    assert (ROOT / file).is_file()
    if test:
        assert re.search(rf"def {test}\b", (ROOT / file).read_text(encoding="utf-8"))


def test_every_file_name_that_the_code_knows_is_in_the_table() -> None:
    names = {each for each in strings() if FILE_NAME.fullmatch(each)} - OWN
    assert len(names) > 30
    assert sorted(names - named()) == []


def test_every_environment_variable_that_the_code_reads_is_in_the_table() -> None:
    names = environment_variables()
    assert "AIAKQ_DEBUG" in names
    assert sorted(names - named()) == []


def test_every_request_header_that_the_server_reads_is_in_the_table() -> None:
    names = request_headers()
    assert {"authorization", "host"} <= names
    assert sorted(names - {each.lower() for each in named()}) == []


def test_security_links_to_the_table() -> None:
    assert "docs/trust.md" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
