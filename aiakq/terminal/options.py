"""Options of the command line: those that commands share, and those built from the table in runtime/args.py.

Standard library and Typer only, so that ``--help`` stays fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from aiakq.arguments.server import Argument
from aiakq.errors import error
from aiakq.terminal.help import default_text

#: Headings of the help page, by group of the table.
_PANELS = {
    "model": "Model",
    "text": "Text",
    "memory": "Memory",
    "scheduling": "Scheduling",
    "server": "Server",
}

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="auto: cuda if there is one, else cpu.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="TEXT", help="Branch, tag or commit of a hub model.")
]
GateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="GATE",
        help="Exit with 10 if this holds, like 'tpot_ms.p50>50': a key of the JSON result, an operator, a number. "
        "May be repeated, or joined with commas.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the same JSON to this file, all or nothing.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Options from a YAML file, like max-model-len: 4096; those on the command line come first.",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Repeat an earlier run. A new one each time if not given."),
]


def with_arguments(
    arguments: Iterable[Argument], model_help: str = "The same as --model.", keyword: str = "engine"
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that gives a command one option per row of the argument table.

    The command's parameter ``keyword`` receives them as one mapping: only the options the user gave, lists split at
    commas; those of a file given with --config are below them. ``model`` is also accepted as the first positional word.
    Rows that the command has options of its own for are left out. The options are there once ``add_options`` was called
    with the command's name: building a hundred takes longer than showing a page without them.
    """
    rows = tuple(arguments)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != keyword]
        taken = {parameter.name for parameter in own}
        names = [row.name for row in rows if row.name not in taken]
        positional = inspect.Parameter(
            "model_word",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Argument(metavar="[MODEL]", help=model_help)],
        )
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)

        def wrapper(**values: Any) -> Any:
            given = {name: values.pop(name, None) for name in names}
            config = values.pop("config")
            word = values.pop("model_word")
            if word is not None and given.get("model") not in (None, word):
                raise error(
                    "option_conflict",
                    option=f"The model {word!r}",
                    other=f"--model {given['model']!r}",
                    reason="both name a model",
                    hint="Give one.",
                )
            given["model"] = word if word is not None else given.get("model")
            for row in rows:
                if row.type is list and given.get(row.name):
                    given[row.name] = [part for text in given[row.name] for part in text.split(",") if part]
            engine = {name: value for name, value in given.items() if value is not None}
            if config is not None:
                from aiakq.terminal.config_file import read_config_file

                engine = read_config_file(config) | engine
            return command(**values, **{keyword: engine})

        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        first = [positional, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), config]

        def sign(added: Iterable[inspect.Parameter]) -> None:
            parameters = [*first, *added]
            wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}

        sign([])
        late = _LATE.setdefault(command.__name__, [])
        late.append(lambda: sign(_parameter(row) for row in rows if row.name in names))
        return wrapper

    return decorate


#: What gives the commands of a name the options of their tables: there is a ``serve`` and a ``bench serve``.
_LATE: dict[str, list[Callable[[], None]]] = {}


def add_options(words: Iterable[str]) -> None:
    """Give their options to those commands whose names are among ``words``, before Typer looks at them."""
    for name in _LATE.keys() & set(words):
        for give in _LATE[name]:
            give()


def _parameter(row: Argument) -> inspect.Parameter:
    """One keyword parameter for Typer. Its default is None, so that only what the user wrote is passed on."""
    names = [row.flag]
    if row.type is bool:
        names = [f"{row.flag}/--no-{row.flag.removeprefix('--')}"]
    if row.short:
        names.append(row.short)
    kind: Any = str if row.written_as_text else list[str] if row.type is list else row.type
    option = typer.Option(
        *names,
        help=_help(row),
        metavar=_metavar(row),
        show_default=False,
        rich_help_panel=_PANELS[row.group],
    )
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(row: Argument) -> str:
    notes = [row.help]
    if row.type is list:
        notes.append("May be repeated, or joined with commas.")
    return " ".join([*notes, default_text(row.default)]).strip()


def _metavar(row: Argument) -> str | None:
    if row.type is bool:
        return None
    if row.choices and len("|".join(row.choices)) <= 24:
        return "|".join(row.choices)
    return {int: "N|auto" if row.automatic else "N", float: "X", str: "TEXT", list: "NAME", dict: "JSON"}[row.type]
