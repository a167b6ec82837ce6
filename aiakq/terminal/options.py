"""Typer options, generated from the tables of aiakq/arguments. Standard library and Typer only: ``--help`` stays
fast.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiakq.errors import error
from aiakq.terminal.help import default_text
from aiakq.terminal.usage_errors import missing_option

if TYPE_CHECKING:
    from aiakq.arguments.argument import Argument
    from aiakq.arguments.commands import CommandArguments
    from aiakq.arguments.spelling import Rewritten

_METAVARS: dict[type, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    list: "NAME",
    tuple: "NAME",
    dict: "JSON",
    Path: "FILE",
}


def with_arguments(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that gives a command the options of ``COMMANDS[name]``.

    The command is called with an instance of each of its parts and, if it takes the engine's arguments, a mapping of
    those that were given. Tables are imported, and options registered with Typer, only when ``add_options`` is called
    with the command's name: building a hundred options takes longer than showing a page without them.
    """

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        def wrapper(**words: object) -> object:
            return command(*_values(name, words))

        def sign() -> None:
            from aiakq.arguments.commands import COMMANDS

            arguments = COMMANDS[name]
            parameters = _parameters(arguments)
            wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
            wrapper.required = _required_words(arguments)  # type: ignore[attr-defined]

        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        _LATE[name] = sign
        return wrapper

    return decorate


#: Command -> the function that adds its options.
_LATE: dict[str, Callable[[], None]] = {}


def has_table(name: str) -> bool:
    """Whether the options of the command ``name`` come from the tables of aiakq/arguments."""
    return name in _LATE


def add_options(words: Iterable[str]) -> None:
    """Add the options of those commands whose names are among ``words``, before Typer parses them."""
    present = set(words)
    for name, sign in _LATE.items():
        if present.issuperset(name.split()):
            sign()


def parser_words(name: str, words: Sequence[str]) -> list[str]:
    """Return the words after the command ``name`` in the spellings that Typer knows, without unsupported options.

    Shows a line about each option that has no effect or is given twice. Raises ``usage`` and ``option_refused``.
    """
    from aiakq.arguments import renamed, unsupported
    from aiakq.arguments.commands import COMMANDS
    from aiakq.terminal import console

    rewritten, rows = _rewrite_words(name, words), COMMANDS[name].unsupported
    unsupported.refuse(rewritten.unsupported, rows)
    lines, found = unsupported.notices(rewritten.unsupported, rows), rewritten.words
    if COMMANDS[name].renamed:
        found, renames = renamed.replaced_words(found, rewritten.unsupported)
        lines = [*renames, *lines]
    for line in (*rewritten.warnings, *lines):
        console.warning(line)
    return found


def _rewrite_words(name: str, words: Sequence[str]) -> Rewritten:
    """Rewrite the words after the command ``name`` to the spellings that Typer knows. Raises ``usage``."""
    from aiakq.arguments.commands import COMMANDS
    from aiakq.arguments.spelling import rewrite
    from aiakq.terminal.usage_errors import check_unknown

    arguments = COMMANDS[name]
    options = arguments.options
    has_model = arguments.model_help is None or bool(os.environ.get("AIAKQ_MODEL"))
    has_model = has_model or any(word.partition("=")[0] == "--model" for word in words)
    return rewrite(
        words,
        options,
        has_model=has_model or not words or not words[0].startswith("-"),
        check_unknown=lambda word: check_unknown(word, options.takes_value),
    )


def _values(name: str, words: dict[str, Any]) -> list[object]:
    """Return the command's parts and the engine's arguments; see ``CommandArguments.values``."""
    from aiakq.arguments.commands import COMMANDS, CONFIG, MissingArgument
    from aiakq.arguments.environment import unknown_variables
    from aiakq.formats import hub
    from aiakq.terminal import console
    from aiakq.terminal.config_file import read_config_file

    hub.announce = console.note
    if name != "serve":  # whose start-up table names the kernels
        console.note_missing_kernels(os.environ)
    for sentence in unknown_variables(os.environ):
        console.warning(sentence)
    arguments = COMMANDS[name]
    model = words.pop("model_word", None)
    own = {row.name for row in arguments.own_rows}
    if model is not None and "model" not in own and words.get("model") not in (None, model):
        raise error(
            "option_conflict",
            option=f"The model {model!r}",
            other=f"--model {words['model']!r}",
            reason="both name a model",
            hint="Give one.",
        )
    file = words.pop(CONFIG.name) or os.environ.get(str(CONFIG.variable))
    config: Mapping[str, Any] = read_config_file(Path(file), arguments.rows, bool(arguments.engine)) if file else {}
    recipe = words.get("recipe") or os.environ.get("AIAKQ_RECIPE") or config.get("recipe") if "recipe" in own else None
    if recipe is not None:
        config = {**_recipe_options(arguments, recipe), **config}
    try:
        return arguments.values(words, os.environ, config, model, str(file) if file and recipe is None else None)
    except MissingArgument as missing:
        raise missing_option(missing.row, name) from None


def _recipe_options(arguments: CommandArguments, file: str) -> dict[str, object]:
    """Return the options of a recipe file, by their keys in configuration files."""
    # A slow import: it loads the transforms and rounders that the file names.
    from aiakq.quantizers.recipe_file import read_recipe

    options = read_recipe(Path(file)).options
    return {row.key: options[row.name] for row in arguments.own_rows if row.name in options}


def _parameters(arguments: CommandArguments) -> list[inspect.Parameter]:
    """Return a command's parameters for Typer. All default to None, so that only given values are passed on."""
    from aiakq.arguments.commands import CONFIG

    parameters = [] if arguments.model_help is None else [_word("model_word", "[MODEL]", arguments.model_help)]
    for row in (*arguments.own_rows, CONFIG, *arguments.engine_rows):
        if row.positional:
            kind: Any = list[str] if row.type in (list, tuple) else str
            parameters.append(_word(row.name, row.metavar or row.name.upper(), _help(row), kind))
        else:
            parameters.append(_option(row))
    return parameters


def _word(name: str, metavar: str, help: str, kind: Any = str) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Argument(metavar=metavar, help=help, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(row: Argument) -> inspect.Parameter:
    names = list(row.all_flags)
    kind: Any = list[str] if row.type in (list, tuple) else str
    if row.type is bool:
        kind = bool
        names = [f"{row.long_flag}/{row.off_flag}", *(name for name in names if name != row.long_flag)]
    option = typer.Option(
        *names,
        help=_help(row),
        metavar=_metavar(row),
        show_default=False,
        rich_help_panel=row.group.capitalize() or None,
    )
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(row: Argument) -> str:
    notes = [row.help]
    if row.required and not row.positional:
        notes.append("Required.")
    if row.type in (list, tuple) and not row.positional:
        joined = "commas" if row.separator == "," else f"{row.separator!r}"
        notes.append(f"May be repeated, or joined with {joined}.")
    return " ".join([*notes, default_text(row.default)]).strip()


def _metavar(row: Argument) -> str | None:
    if row.type is bool:
        return None
    if row.metavar is not None:
        return row.metavar
    if row.choices and len("|".join(row.choices)) <= 24:
        return "|".join(row.choices)
    return "N|auto" if row.type is int and row.automatic else _METAVARS[row.type]


def _required_words(arguments: CommandArguments) -> list[str]:
    """Return the required options as shown in the usage line of the help page."""
    return [f"{row.flag} {_metavar(row)}" for row in arguments.own_rows if row.required and not row.positional]
