"""The arguments of each command, resolved from the command line, the environment and a configuration file.

The command line takes precedence over the environment, the environment over the file, and the file over defaults.
Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from aiakq.arguments import unsupported_bench
from aiakq.arguments.argument import Argument, checked_value, rows_of, split_list, value_of_text
from aiakq.arguments.bench import (
    KernelArguments,
    LatencyArguments,
    RepeatArguments,
    ServeArguments,
    SweepArguments,
    ThroughputArguments,
)
from aiakq.arguments.chat import ChatArguments
from aiakq.arguments.checkpoint import ConvertArguments, EvalArguments, InspectArguments, ModelComparisonArguments
from aiakq.arguments.common import ConfigArguments, JsonArguments, ResultArguments
from aiakq.arguments.comparison import AlternationArguments, CompareArguments, CounterArguments, ReportArguments
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.quantize import DryRunArguments, QuantizeArguments
from aiakq.arguments.server import ARGUMENTS, RENAMED, Renamed
from aiakq.arguments.spelling import Options
from aiakq.arguments.translate import TranslateArguments
from aiakq.arguments.unsupported import UNSUPPORTED, refuse
from aiakq.arguments.unsupported_row import Unsupported
from aiakq.errors import error

#: The option that names a configuration file; every command has it.
(CONFIG,) = rows_of(ConfigArguments)


@dataclass(frozen=True)
class CommandArguments:
    """The arguments of one command.

    parts       dataclasses of the command's own options; the command receives an instance of each.
    engine      arguments of the engine and the server; the command receives a mapping of those that were given.
    model_help  help of the positional argument that names the engine's model; None: there is none.
    external    whether it can also use an external engine; the environment then sets none of ``engine``.
    also        options of vLLM's command of this name that do not apply, besides those of the engine.
    """

    parts: tuple[type, ...] = ()
    engine: tuple[Argument, ...] = ()
    model_help: str | None = None
    external: bool = False
    also: tuple[Unsupported, ...] = ()

    @cached_property
    def own_rows(self) -> tuple[Argument, ...]:
        return tuple(row for part in self.parts for row in rows_of(part))

    @cached_property
    def engine_rows(self) -> tuple[Argument, ...]:
        """The rows of ``engine`` without an own option of the same name."""
        own = {row.key for row in self.own_rows}
        return tuple(row for row in self.engine if row.key not in own)

    @property
    def rows(self) -> tuple[Argument, ...]:
        return (*self.own_rows, *self.engine_rows)

    @property
    def options(self) -> Options:
        """All options as the words of a command line may spell them."""
        # Those of the engine take several words, as vLLM's do; others only if no positional argument could follow.
        lists = self.engine_rows if any(row.positional for row in self.own_rows) else self.rows
        several = {row.name for row in lists if row.type in (list, tuple)}
        return Options((*self.rows, CONFIG), (*self.unsupported.values(), *self.renamed.values()), several)

    @cached_property
    def unsupported(self) -> dict[str, Unsupported]:
        """Options that are accepted without an effect or refused, by name."""
        rows = (*(UNSUPPORTED if self.engine else ()), *self.also)
        return {row.name: row for row in rows}

    @property
    def renamed(self) -> Mapping[str, Renamed]:
        """Options that have another name here, by the old one."""
        return RENAMED if self.engine else {}

    def values(
        self,
        words: Mapping[str, Any],
        environment: Mapping[str, str],
        config: Mapping[str, Any],
        model: str | None = None,
        file: str | None = None,
    ) -> list[Any]:
        """Return an instance of each part, then the mapping for the engine if there is one.

        words        by ``name``: strings, booleans and lists of strings of the command line; None if not given.
        environment  variables of the process.
        config       by ``key``: values of a configuration file.
        model        positional argument that names the engine's model.
        file         the name of the configuration file, for messages.
        Raises ``usage`` for unknown keys, ``bad_option``, and MissingArgument.
        """
        self._check_keys(config, file)
        own = given_values(self.own_rows, words, environment, config, file)
        for row in self.own_rows:
            if row.required and row.name not in own:
                raise MissingArgument(row)
        values: list[object] = [_instance(part, own) for part in self.parts]
        if self.engine:
            ambient = {} if self.external and model is None else environment
            engine = given_values(self.engine_rows, words, ambient, config, file)
            values.append(engine if model is None else engine | {"model": model})
        return values

    def _check_keys(self, config: Mapping[str, object], file: str | None) -> None:
        known = {row.key for row in self.rows}
        for key in config:
            if key not in known:
                kind = "engine argument" if self.engine else "option"
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
                hint = f"Did you mean {close[0]}?" if close else "Its keys are the options, as --help lists them."
                raise error("usage", reason=f"There is no {kind} {key!r}{_in_file(file)}.", hint=hint)


def _instance(part: type, values: Mapping[str, object]) -> object:
    """Return an instance of ``part`` with those of ``values`` that are its fields."""
    return part(**{field.name: values[field.name] for field in fields(part) if field.name in values})


class MissingArgument(Exception):
    """Raised when a required option was not given."""

    def __init__(self, row: Argument) -> None:
        super().__init__(row.name)
        self.row = row


def _in_file(file: str | None) -> str:
    return f" in {file}" if file else ""


def given_values(
    rows: tuple[Argument, ...],
    words: Mapping[str, object],
    environment: Mapping[str, str],
    config: Mapping[str, object],
    file: str | None = None,
) -> dict[str, object]:
    """Return the validated values of all rows that were given, by ``name``. Raises ``bad_option``, and
    ``option_refused`` for values of vLLM that something else replaces.
    """
    values = {}
    for row in rows:
        word = words.get(row.name)
        variable = next((name for name in row.variables if environment.get(name)), None)
        refuse({row.name: environment[variable] if word is None and variable else word or config.get(row.key)}, {})
        if isinstance(word, list):
            values[row.name] = checked_value(row, [part for text in word for part in split_list(row, text)])
        elif isinstance(word, str):
            values[row.name] = value_of_text(row, word)
        elif word is not None:
            values[row.name] = checked_value(row, word)
        elif variable:
            values[row.name] = value_of_text(row, environment[variable], variable)
        elif config.get(row.key) is not None:
            source = f"{row.flag}{_in_file(file)}" if file else None
            values[row.name] = _configured(row, config[row.key], source)
    return values


def _configured(row: Argument, value: object, source: str | None) -> object:
    """Return a validated value of a configuration file; text in place of a number or a switch is parsed."""
    if isinstance(value, str) and row.type in (int, float, bool):
        return value_of_text(row, value, source)
    return checked_value(row, value, source)


_MODEL = "The same as --model."
COMMANDS: dict[str, CommandArguments] = {
    "quantize": CommandArguments((QuantizeArguments, DryRunArguments, JsonArguments)),
    "convert": CommandArguments((ConvertArguments, JsonArguments)),
    "serve": CommandArguments(engine=ARGUMENTS, model_help=_MODEL),
    "chat": CommandArguments(
        (ChatArguments, JsonArguments),
        ENGINE_ARGUMENTS,
        "Folder or hub name of a model to start a server for.",
        external=True,
    ),
    "eval": CommandArguments((EvalArguments, JsonArguments, ResultArguments)),
    "compare": CommandArguments((ModelComparisonArguments, JsonArguments)),
    "inspect": CommandArguments((InspectArguments, JsonArguments)),
    "translate": CommandArguments((TranslateArguments, JsonArguments)),
    "bench latency": CommandArguments(
        (LatencyArguments, ResultArguments), ENGINE_ARGUMENTS, _MODEL, also=unsupported_bench.LATENCY
    ),
    "bench throughput": CommandArguments(
        (ThroughputArguments, ResultArguments), ENGINE_ARGUMENTS, _MODEL, also=unsupported_bench.THROUGHPUT
    ),
    "bench serve": CommandArguments(
        (ServeArguments, RepeatArguments, ResultArguments),
        ENGINE_ARGUMENTS,
        "Folder or hub name of a model to start a server for.",
        external=True,
        also=unsupported_bench.SERVE,
    ),
    "bench sweep": CommandArguments(
        (ServeArguments, SweepArguments, ResultArguments),
        ENGINE_ARGUMENTS,
        "Folder or hub name of a model to start a server for.",
        external=True,
    ),
    "bench compare": CommandArguments((CompareArguments, ReportArguments)),
    "bench ab": CommandArguments((AlternationArguments, ReportArguments), ENGINE_ARGUMENTS, _MODEL),
    "bench counters": CommandArguments((CounterArguments, ReportArguments), ENGINE_ARGUMENTS, _MODEL),
    "bench kernels": CommandArguments((KernelArguments, ResultArguments)),
}
