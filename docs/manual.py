"""The manual page aiakq.1, from the tables in aiakq/arguments. Standard library only: the installation writes it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from aiakq.arguments.argument import Argument  # noqa: E402 - this is how a checkout is found before it is installed
from aiakq.arguments.commands import COMMANDS  # noqa: E402
from aiakq.arguments.environment import SETTINGS  # noqa: E402
from aiakq.errors import kind as codes  # noqa: E402

PAGE = ROOT / "docs" / "aiakq.1"
#: The commands, in the order in which pages list them.
COMMAND_NAMES = (
    "quantize",
    "convert",
    "serve",
    "chat",
    "bench",
    *(name for name in COMMANDS if " " in name),
    "eval",
    "compare",
    "inspect",
    "translate",
    "collect-env",
    "completion",
)
_MANUAL_HEAD = """\
.\\" Written by docs/manual.py from the tables of options.
.TH AIAKQ 1 "" "aiakq" "User Commands"
.ad l
.SH NAME
aiakq \\- quantize a Hugging Face model, check it, serve it, measure it
.SH SYNOPSIS
.B aiakq
.I COMMAND
.RI [ OPTION ]...
.SH DESCRIPTION
Results go to standard output as JSON, everything for people to standard error. The documentation has pages about each
command; this one lists the options.
.PP
Every option can also be set by an environment variable, whose name is AIAKQ_ and that of the option with underscores,
and in the YAML file of
.BR \\-\\-config .
The command line comes first, then the environment, then the file.
"""
_EXIT_CODES = {
    0: "success, or an orderly end of a server",
    codes.BUG: "a bug in aiakq",
    codes.USAGE: "wrong options or arguments",
    codes.BAD_INPUT: "a model, data or a file that cannot be used",
    codes.UNSAFE: "refused, because it would run code of a model or leave its folder",
    codes.RESOURCES: "too little memory or disk space",
    codes.CONFLICT: "something is in the way: a port, an output folder, another machine's results",
    codes.ENVIRONMENT: "something is missing or unreachable: a package, a device, the network",
    codes.NUMERIC: "numbers that are not finite",
    codes.WORKER: "a process of aiakq ended, or a server does not keep up",
    codes.GATE: "a gate, or a comparison, failed",
    codes.UNDECIDED: "a comparison is undecided",
    130: "interrupted (INT)",
    143: "terminated (TERM)",
}


def manual_page() -> str:
    """Return the manual page."""
    about = _summaries()
    lines = [_MANUAL_HEAD.rstrip(), ".SH COMMANDS"]
    for name in COMMAND_NAMES:
        lines += [".SS", _roff(f"aiakq {name}"), _roff(about[name])]
        arguments = COMMANDS.get(name)
        rows = [row for row in arguments.own_rows if not row.positional] if arguments else []
        engine = arguments.engine_rows if arguments and name == "serve" else ()
        lines += [each for row in (*rows, *engine) for each in _manual_entry(row)]
        if arguments and arguments.engine_rows and not engine:
            lines += [".PP", "Also takes the options of the engine, see", '.BR "aiakq serve" .']
    lines += [".SH ENVIRONMENT"]
    for variable, text in SETTINGS.items():
        lines += [".TP", f".B {_roff(variable)}", _roff(text.replace("`", ""))]
    lines += [".SH EXIT STATUS"]
    for code, text in _EXIT_CODES.items():
        lines += [".TP", f".B {code}", _roff(text)]
    return "\n".join(lines) + "\n"


def _summaries() -> dict[str, str]:
    """Return what each command does: docstrings in aiakq/terminal, and ``help`` of groups, as ``--help`` shows them."""
    texts = {}
    for path in sorted((ROOT / "aiakq" / "terminal").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                group = "bench " if any("bench.command" in ast.unparse(each) for each in node.decorator_list) else ""
                texts[group + node.name] = ast.get_docstring(node) or ""
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                constants = {key.arg: getattr(key.value, "value", None) for key in node.value.keywords}
                if "help" in constants:
                    texts[str(constants["name"])] = str(constants["help"])
    functions = {name: name.replace("-", "_") for name in COMMAND_NAMES} | {"eval": "evaluate"}
    return {name: texts[function] for name, function in functions.items()}


def _manual_entry(row: Argument) -> list[str]:
    """One option of the man page."""
    value = "" if row.type is bool else f" {row.metavar or ('|'.join(map(str, row.choices)) or 'VALUE')}"
    default = "" if row.default in (None, False, (), {}) or row.required else f" Default: {row.default}."
    return [".TP", f".B {_roff(', '.join(row.all_flags) + value)}", _roff(row.help + default)]


def _roff(text: str) -> str:
    """Plain text for a line of a man page."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    if "-" in sys.argv[1:]:
        sys.stdout.write(manual_page())
    else:
        PAGE.write_text(manual_page(), encoding="utf-8")
