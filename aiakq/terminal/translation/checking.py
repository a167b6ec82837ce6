"""Checks of options and commands by the tables of ``aiakq serve``, without looking for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.arguments.argument import Argument, value_of_text
from aiakq.arguments.commands import COMMANDS
from aiakq.arguments.server import checked
from aiakq.arguments.spelling import rewrite
from aiakq.arguments.unsupported import refuse
from aiakq.errors import AiakqError, error
from aiakq.terminal.translation.shell import EXPANSION


def value_problem(row: Argument, texts: list[str]) -> str | None:
    """Return why ``row`` does not accept one of ``texts``."""
    try:
        for text in texts:
            if EXPANSION not in text and row.type not in (list, tuple):
                value_of_text(row, text)
    except AiakqError as problem:
        return f"{problem.message} {problem.remedy}".strip().removesuffix(".")
    return None


def check_command(words: list[str]) -> None:
    """Validate the words after ``aiakq serve``. Raises what that command raises for them before it looks for files."""
    arguments = COMMANDS["serve"]
    model, rest = words[0], words[1:]
    values: dict[str, Any] = {}
    rewritten = rewrite(rest, arguments.options, check_unknown=_unknown)
    refuse(rewritten.unsupported, arguments.unsupported)
    pairs = iter(rewritten.words)
    options = arguments.options
    for word in pairs:
        spelled = options.find(word)
        assert spelled is not None
        if spelled.is_switch:
            values[spelled.row.name] = not spelled.off
        elif spelled.is_list:
            values.setdefault(spelled.row.name, []).append(next(pairs))
        else:
            values[spelled.row.name] = next(pairs)
    known: Mapping[str, Any] = {name: value for name, value in values.items() if EXPANSION not in str(value)}
    checked(arguments.values(known, {}, {}, model)[0], server=True)


def _unknown(word: str) -> None:
    raise error("usage", reason=f"There is no option {word}.", hint="")
