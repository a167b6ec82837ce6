"""Values in messages: shortened before they are spelled out, whatever their size."""

from __future__ import annotations

import shlex

import pytest

from aiakq.arguments.argument import checked_value
from aiakq.arguments.commands import COMMANDS
from aiakq.errors import AiakqError, error, short_repr


def nested(levels: int) -> list:
    value: list = ["x"]
    for _ in range(levels):
        value = [value] * 10
    return value


def test_a_value_that_would_fill_memory_is_shortened():
    row = next(row for row in COMMANDS["quantize"].rows if row.name == "bits")
    with pytest.raises(AiakqError) as caught:
        checked_value(row, nested(12))
    assert len(str(caught.value)) < 4000 and "--bits is [[[" in caught.value.message
    assert len(short_repr("x" * 10**6)) < 250 and len(short_repr({n: n for n in range(1000)})) < 100
    problem = error("usage", reason=nested(12), hint="")
    assert len(problem.message) < 4000 and len(str(problem.plain_fields)) < 4000


@pytest.mark.parametrize("value", [1, 1.5, True, None, "text", "it's", [1, "a"], {"a": 1}])
def test_short_values_are_spelled_as_they_are(value):
    assert short_repr(value) == repr(value)


def test_integers_that_python_does_not_spell_are_named_by_their_length():
    problem = error("bad_option", option="--seed", value=10**5000, expected="an integer", hint="")
    assert "--seed is an integer of 16610 bits" in problem.message
    assert short_repr([10**5000]) == "[an integer of 16610 bits]"
    assert len(str(problem.plain_fields)) < 200 and isinstance(problem.plain_fields["value"], str)


@pytest.mark.parametrize("path", ["/models/My Model", "it's", "a;b", "$HOME", "plain"])
def test_commands_in_remedies_can_be_copied_to_a_shell(path):
    remedy = error("path_outside_model", path=path, file="config.json -> /x").remedy
    command = remedy[remedy.index("cp -rL") : remedy.index(" COPY")]
    assert shlex.split(command) == ["cp", "-rL", path]
