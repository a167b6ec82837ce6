"""The error registry: every id is raised somewhere, every raise is in it, every template fills."""

from __future__ import annotations

import ast
import functools
import string
from pathlib import Path

import pytest

from aiakq.errors import REGISTRY, AiakqError, error

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def raised() -> dict[str, list[tuple[str, set[str] | None]]]:
    """id -> places that build it, with the fields they give (None where they are passed through)."""
    found: dict[str, list[tuple[str, set[str] | None]]] = {}
    for path in ROOT.glob("aiakq/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "error":
                if node.args and isinstance(node.args[0], ast.Constant):
                    fields = {keyword.arg for keyword in node.keywords}
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.setdefault(node.args[0].value, []).append((where, None if None in fields else fields))
    return found


def fields_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def test_every_id_is_raised_and_every_raise_is_registered():
    ids = {id for id in raised() if isinstance(id, str)}
    assert set(REGISTRY) - ids == set(), "ids that nothing raises"
    assert ids - set(REGISTRY) == set(), "raised, but not in the registry"


@pytest.mark.parametrize("id", sorted(REGISTRY))
def test_every_raise_fills_its_templates(id):
    kind = REGISTRY[id]
    needed = fields_of(kind.message) | fields_of(kind.remedy)
    for where, given in raised().get(id, []):
        if given is not None:
            assert needed <= given, f"{where} does not give {needed - given}"
    assert "\n" not in kind.message + kind.remedy, "an error is one line"


def test_an_error_is_one_line_with_its_remedy():
    problem = error("model_missing", path="here")
    assert isinstance(problem, AiakqError) and problem.exit_code == 3 and problem.http_status == 400
    assert str(problem).startswith("There is no model at 'here'. Give a folder")
    assert problem.body()["error"]["code"] == "model_missing"
    with pytest.raises(KeyError):
        error("no_such_error")


def test_what_is_unavailable_says_when_to_try_again():
    assert error("loading").retry_after == error("shutting_down").retry_after == 10
    assert error("queue_timeout", limit=1).retry_after == 1
    assert error("no_tokenizer").retry_after is None
