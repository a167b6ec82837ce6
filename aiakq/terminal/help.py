"""Help pages for 80 columns, with every option name in full.

Typer's own page uses five columns and truncates long flags; this one uses two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer.core
from rich.console import Console
from rich.text import Text

from aiakq.terminal.console import out

#: Maximum width of the label column; longer labels get their own line.
_LABEL_WIDTH = 24
#: Longer lines are hard to read.
_MAX_WIDTH = 140
#: Footer of every command's page, with one of its options.
_SOURCES = (
    "Options can also be set by environment variables (AIAKQ_{variable}={value} is {flag} {value}) and in the file of "
    "--config. The command line comes first, then the environment, then the file."
)
#: Options that make good examples, and a value.
_EXAMPLES = {"--seed": "1", "--device": "cpu", "--port": "8000", "--revision": "main", "--to": "gptq"}


class Command(typer.core.TyperCommand):
    """A command with this module's help page."""

    def format_help(self, ctx: object, formatter: object) -> None:
        _print_help(self, ctx, _sources(self.get_params(ctx)))  # type: ignore[arg-type]


class PlainCommand(typer.core.TyperCommand):
    """A command whose options are read from the command line only."""

    def format_help(self, ctx: object, formatter: object) -> None:
        _print_help(self, ctx, None)


class Group(typer.core.TyperGroup):
    """A group of commands with this module's help page."""

    def format_help(self, ctx: object, formatter: object) -> None:
        _print_help(self, ctx, self.epilog)


def _sources(parameters: Iterable[Any]) -> str | None:
    """Return the footer, with an option that the command has; None for a command without options that take a value."""
    flags = {flag for each in parameters if not getattr(each, "is_flag", False) for flag in each.opts}
    flag = next((flag for flag in _EXAMPLES if flag in flags), None)
    flag = flag or min((each for each in flags - {"--config"} if each.startswith("--")), default=None)
    if flag is None:
        return None
    variable = flag.removeprefix("--").replace("-", "_").upper()
    return _SOURCES.format(variable=variable, flag=flag, value=_EXAMPLES.get(flag, "VALUE"))


def _print_help(command: Any, ctx: object, epilog: str | None) -> None:
    console = out()
    console.width = min(console.width, _MAX_WIDTH)
    shown = [parameter for parameter in command.get_params(ctx) if not getattr(parameter, "hidden", False)]
    console.print(Text.assemble(("Usage: ", "bold"), _usage(command, ctx, shown)))
    console.print()
    _paragraph(console, command.help)
    subcommands = getattr(command, "commands", {})
    if subcommands:
        rows = [(Text(name, "bold"), Text(_first_sentence(below.help))) for name, below in subcommands.items()]
        _section(console, "Commands", rows)
    panels: dict[str, list[tuple[Text, Text]]] = {}
    for parameter in shown:
        panels.setdefault(_panel(parameter), []).append((_label(parameter), Text(_description(parameter))))
    for title, rows in panels.items():
        _section(console, title, rows)
    if epilog:
        console.print()
        _paragraph(console, epilog)


def _paragraph(console: Console, text: str | None) -> None:
    for line in Text(" ".join((text or "").split())).wrap(console, console.width):
        line.rstrip()
        console.print(line, soft_wrap=True)


def _usage(command: Any, ctx: Any, shown: Iterable[Any]) -> str:
    words = [ctx.command_path]
    for parameter in shown:
        if parameter.param_type_name == "argument":
            words.append(parameter.metavar or parameter.name.upper())
    words += getattr(command.callback, "required", [])
    words.append("COMMAND ..." if hasattr(command, "commands") else "[OPTIONS]")
    return " ".join(words)


def _section(console: Console, title: str, rows: list[tuple[Text, Text]]) -> None:
    console.print()
    console.print(Text(f"{title}:", "bold"))
    indent = " " * (_LABEL_WIDTH + 4)
    for label, text in rows:
        lines = list(text.wrap(console, console.width - len(indent)))
        if label.cell_len <= _LABEL_WIDTH and lines:
            first = Text.assemble("  ", label, " " * (_LABEL_WIDTH + 2 - label.cell_len), lines.pop(0))
        else:
            first = Text.assemble("  ", label)
        for line in (first, *(Text.assemble(indent, rest) for rest in lines)):
            line.rstrip()
            console.print(line, soft_wrap=True)


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def _label(parameter: Any) -> Text:
    if parameter.param_type_name == "argument":
        return Text(parameter.metavar or parameter.name.upper(), "bold")
    names = sorted(parameter.opts, key=len)
    if [f"--no-{name.removeprefix('--')}" for name in names] == parameter.secondary_opts:
        names = [f"--[no-]{names[0].removeprefix('--')}"]
    else:
        names += parameter.secondary_opts
    label = Text(", ").join(Text(name, "bold cyan") for name in names)
    if not parameter.is_flag:
        label.append(f" {parameter.metavar or 'VALUE'}")
    return label


def _description(parameter: Any) -> str:
    words = [" ".join((parameter.help or "").split())]
    if getattr(parameter, "show_default", False) and default_text(parameter.default):
        words.append(default_text(parameter.default))
    return " ".join(words)


def default_text(value: object) -> str:
    """Format a default value; empty for None, for flags that are off and for empty values."""
    if value is None or value is False or value == () or value == "":
        return ""
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"(default: {'yes' if value is True else f'{value:g}' if isinstance(value, float) else value})"


def _first_sentence(text: str | None) -> str:
    sentence, stop, _ = " ".join((text or "").split()).partition(". ")
    return sentence + ("." if stop else "")
