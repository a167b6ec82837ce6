"""``aiakq completion``: scripts for shell completion of commands, options, their values and files.

The scripts contain all names, so that completion does not start Python. They are generated from the program's options.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from aiakq.errors import error
from aiakq.terminal import console
from aiakq.terminal.usage_errors import close_names

SHELLS = ("bash", "zsh", "fish")
#: Metavars of values that are files or folders.
_FILES = {"FILE", "DIR", "MODEL", "PATH", "FOLDER", "OUT"}

_BASH_HEAD = """\
# bash completion for aiakq: source <(aiakq completion bash)
_aiakq() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"
    local command="" word words="" files=""
    if [[ "$cur" == "=" ]]; then cur=""; elif [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$command $word" in"""


@dataclass(frozen=True)
class OptionWords:
    """One option: its spellings, whether it takes a value, the allowed values, and whether it is a file."""

    flags: tuple[str, ...]
    about: str
    takes_value: bool
    choices: tuple[str, ...]
    is_file: bool


@dataclass(frozen=True)
class CommandWords:
    """One command: its words after "aiakq", its options, and its subcommands with their descriptions."""

    words: tuple[str, ...]
    options: tuple[OptionWords, ...]
    below: dict[str, str]


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """Print a shell completion script for aiakq's commands and options: source <(aiakq completion bash)."""
    if shell not in SHELLS:
        reason = f"There is no completion for {shell!r}."
        raise error("usage", reason=reason, hint=close_names(shell, SHELLS) or "There is one for bash, zsh and fish.")
    console.write(script(shell, list(describe(context.find_root().command))))


def script(shell: str, commands: list[CommandWords]) -> str:
    """Return the script for ``shell``, one of SHELLS."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def describe(command: Any, words: tuple[str, ...] = ()) -> Iterator[CommandWords]:
    """Describe a Typer command and all its subcommands."""
    from aiakq.arguments.commands import COMMANDS

    arguments = COMMANDS.get(" ".join(words))
    rows = {flag: row for row in (arguments.rows if arguments else ()) for flag in row.all_flags}
    options = []
    for parameter in command.params:
        flags = tuple(each for each in (*parameter.opts, *parameter.secondary_opts) if each.startswith("-"))
        if not flags:
            continue
        row = next((rows[flag] for flag in flags if flag in rows), None)
        about = (getattr(parameter, "help", None) or "").split(". ")[0].rstrip(".")
        metavar = getattr(parameter, "metavar", None) or ""
        is_file = metavar in _FILES or (row is not None and (Path in (row.type, *row.also) or row.name == "model"))
        choices = tuple(map(str, row.choices)) if row is not None else ()
        options.append(OptionWords(flags, about, not parameter.is_flag, choices, is_file))
    options.append(OptionWords(("--help", "-h"), "Show this message and exit", False, (), False))
    below = getattr(command, "commands", {})
    about_below = {name: (each.help or "").split(". ")[0].split(": ")[0].rstrip(".") for name, each in below.items()}
    yield CommandWords(words, tuple(options), about_below)
    for name, each in below.items():
        yield from describe(each, (*words, name))


def _bash(commands: list[CommandWords]) -> str:
    """Return a function for bash's ``complete``."""
    lines = [_BASH_HEAD]
    for command in commands:
        if command.words:
            above, whole = " ".join(command.words[:-1]), " ".join(command.words)
            lines.append(f'            "{above} {command.words[-1]}") command="{whole}" ;;')
    lines += ["        esac", "    done", '    case "$command:$prev" in']
    for command in commands:
        for option in command.options:
            if option.takes_value:
                names = "|".join(f'"{" ".join(command.words)}:{flag}"' for flag in option.flags)
                kind = f'-W "{" ".join(option.choices)}"' if option.choices else "-f" if option.is_file else '-W ""'
                lines.append(f'        {names}) COMPREPLY=($(compgen {kind} -- "$cur")); return ;;')
    lines += ["    esac", '    case "$command" in']
    for command in commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        names = " ".join(command.below)
        files = "" if command.below else ' files="-f"'
        lines.append(f'        "{" ".join(command.words)}") words="{" ".join(filter(None, (names, flags)))}"{files} ;;')
    lines += [
        "    esac",
        '    if [[ "$cur" == -* ]]; then files=""; fi',
        '    COMPREPLY=($(compgen $files -W "$words" -- "$cur"))',
        "}",
        "complete -o filenames -F _aiakq aiakq",
    ]
    return "\n".join(lines) + "\n"


def _zsh(commands: list[CommandWords]) -> str:
    """Return a function for zsh's completion system."""
    lines = ["#compdef aiakq", "# zsh completion for aiakq: aiakq completion zsh > DIR_OF_FPATH/_aiakq", ""]
    for command in commands:
        name = "_".join(("_aiakq", *command.words)).replace("-", "_")
        lines.append(f"{name}() {{")
        if command.below:
            entries = " ".join(shlex.quote(f"{each}:{about}") for each, about in command.below.items())
            lines += [
                "    if (( CURRENT == 2 )); then",
                f"        local -a commands=({entries})",
                "        _describe command commands",
                f"        _arguments {' '.join(_zsh_option(option) for option in command.options)}",
                "        return",
                "    fi",
                "    shift words; (( CURRENT-- ))",
                "    case $words[1] in",
            ]
            for each in command.below:
                lines.append(f"        {each}) {'_'.join((name, each)).replace('-', '_')} ;;")
            lines += ["    esac", "}", ""]
        else:
            parts = [_zsh_option(option) for option in command.options] + ["'*:file:_files'"]
            lines += ["    _arguments \\", " \\\n".join(f"        {part}" for part in parts), "}", ""]
    lines += ['if [ "$funcstack[1]" = "_aiakq" ]; then _aiakq "$@"; else compdef _aiakq aiakq; fi']
    return "\n".join(lines) + "\n"


def _zsh_option(option: OptionWords) -> str:
    about = "".join({"[": "(", "]": ")", ":": "\\:"}.get(letter, letter) for letter in option.about)
    action = (
        f":value:({' '.join(option.choices)})" if option.choices else ":file:_files" if option.is_file else ":value: "
    )
    return " ".join(shlex.quote(f"*{flag}[{about}]{action if option.takes_value else ''}") for flag in option.flags)


def _fish(commands: list[CommandWords]) -> str:
    """Return calls of fish's ``complete``."""
    lines = ["# fish completion for aiakq: aiakq completion fish > ~/.config/fish/completions/aiakq.fish"]
    lines.append("complete -c aiakq -n '__fish_use_subcommand' -f")
    for command in commands:
        above = [f"__fish_seen_subcommand_from {word}" for word in command.words]
        names = " ".join(command.below)
        none_below = [f"not __fish_seen_subcommand_from {names}"] if names and command.words else []
        condition = shlex.quote("; and ".join(above + none_below) or "__fish_use_subcommand")
        for name, about in command.below.items():
            lines.append(f"complete -c aiakq -n {condition} -f -a {name} -d {shlex.quote(about)}")
        for option in command.options:
            parts = [f"complete -c aiakq -n {condition}"]
            for flag in option.flags:
                kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
                parts.append(f"{kind} {flag.lstrip('-')}")
            if option.takes_value:
                parts.append("-r -F" if option.is_file else f"-x -a {shlex.quote(' '.join(option.choices))}")
            lines.append(f"{' '.join(parts)} -d {shlex.quote(option.about)}")
    return "\n".join(lines) + "\n"


def words_with_options(words: list[str]) -> list[str]:
    """Return the words for ``add_options``: for ``aiakq completion``, which describes all commands, those of all."""
    if words[:1] != ["completion"]:
        return words
    from aiakq.arguments.commands import COMMANDS

    return [word for name in COMMANDS for word in name.split()]
