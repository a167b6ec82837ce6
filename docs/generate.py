"""Write the reference pages that come from code: docs/structure.md, arguments.md, errors.md and cli.md.

``make docs`` runs this; tests/test_docs.py fails when a page is not what this would write.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from aiakq.arguments.server import ARGUMENTS, Argument
from aiakq.arguments.unsupported import FOREIGN
from aiakq.errors import REGISTRY

DOCS = Path(__file__).resolve().parent
_MEASURES = ("latency", "throughput", "serve", "kernels")
COMMANDS = ["", "quantize", "serve", "bench", *(f"bench {name}" for name in _MEASURES), "eval", "inspect"]

_GROUPS = {
    "model": "Which model, and in what arithmetic.",
    "text": "Which tokenizer.",
    "memory": "How much memory, and what it is used for.",
    "scheduling": "What runs in a step.",
    "server": "Only for `aiakq serve`.",
}


_FOREIGN = (
    "vLLM and AIAK have these, and their scripts start here, too. They are not in `--help`; a line says what is not",
    "done.",
)


def arguments_page() -> str:
    """docs/arguments.md from the table in aiakq/arguments/server.py."""
    accepted, refused = ([row for row in FOREIGN if row.refused is which] for which in (False, True))
    lines = [
        "# Arguments of the engine and the server",
        "",
        "Written by `make docs` from `aiakq/arguments/server.py`. Each is an option of `aiakq serve` (and, but for the",
        "server group, of `aiakq bench latency` and `throughput`) and a keyword of `LLM(...)`, with underscores for",
        "dashes. Names and defaults follow vLLM's where those exist.",
        "",
        f"{len(ARGUMENTS)} work and are described first; [other engines](#of-other-engines) have {len(accepted)} more",
        f"that are accepted and do nothing, and {len(refused)} that are refused.",
    ]
    for group, about in _GROUPS.items():
        lines += ["", f"## {group.capitalize()}", "", about, "", "| option | default | what it does |", "|---|---|---|"]
        lines += [_argument_row(argument) for argument in ARGUMENTS if argument.group == group]
    lines += [
        "",
        "## Of other engines",
        "",
        *_FOREIGN,
        "",
        "| option | accepted: it does nothing, because |",
        "|---|---|",
    ]
    lines += [f"| `{row.flag}` | {row.why} |" for row in accepted]
    lines += ["", "| option | refused, but for | because |", "|---|---|---|"]
    lines += [f"| `{row.flag}` | {', '.join(f'`{v}`' for v in row.harmless)} | {row.why} |" for row in refused]
    return "\n".join(lines) + "\n"


def _argument_row(argument: Argument) -> str:
    flag = f"`{argument.flag}`"
    if argument.type is bool:
        flag = f"`{argument.flag}` / `--no-{argument.flag[2:]}`"
    if argument.short:
        flag += f", `{argument.short}`"
    default = "" if argument.default is None else f"`{str(argument.default).lower()}`"
    if argument.type is str and argument.default is not None:
        default = f"`{argument.default}`"
    text = argument.help.replace("|", "\\|")
    if argument.spelled:
        text += " Like 4096, 25.6k, 32K."
    if argument.choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in argument.choices) + "."
    bounds = [f"at least {argument.low:g}"] if argument.low is not None else []
    bounds += [f"at most {argument.high:g}"] if argument.high is not None else []
    if bounds:
        text += f" ({', '.join(bounds)})"
    return f"| {flag} | {default} | {text} |"


def errors_page() -> str:
    """docs/errors.md from the registry in aiakq/errors.py."""
    lines = [
        "# Errors",
        "",
        "Written by `make docs` from `aiakq/errors.py`. On the command line an error is one line,",
        "`aiakq: error[id]: sentence remedy`, and the exit code below; from the server it is",
        '`{"error": {"message", "type", "param", "code"}}` with the id as `code` and the status below.',
        "",
        "| id | exit code | HTTP | sentence | remedy |",
        "|---|---|---|---|---|",
    ]
    for id, kind in REGISTRY.items():
        cells = (f"`{id}`", str(kind.exit_code), str(kind.http_status), kind.message, kind.remedy)
        lines.append("| " + " | ".join(re.sub(r"[|<>]", lambda m: "\\" + m[0], cell) for cell in cells) + " |")
    lines += [
        "",
        "Exit codes: 0 success, 1 a bug in aiakq, 2 usage, 3 bad input, 4 refused as unsafe, 5 out of resources,",
        "6 output conflict, 7 environment, 8 numeric failure, 9 worker failure, 10 a gate failed, 130 and 143 signals.",
    ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """docs/cli.md from the commands' own --help."""
    lines = ["# Command line", "", "Written by `make docs`: the `--help` of every command."]
    for command in COMMANDS:
        words = ["aiakq", *command.split()]
        lines += ["", f"## {' '.join(words)}", "", "```", help_text(words[1:]), "```"]
    return "\n".join(lines) + "\n"


def help_text(words: list[str]) -> str:
    """``aiakq WORDS --help`` at 110 columns, without colors or trailing blanks."""
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "TERMINAL_WIDTH": "110"}
    script = Path(sys.executable).with_name("aiakq")
    done = subprocess.run([str(script), *words, "--help"], capture_output=True, text=True, env=environment, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


STRUCTURE = """\
# Structure

Written by `make docs` from the first line of every source file.

Two folders hold the product: `aiakq/`, the tool, and `kernels/`, the arithmetic, imported as `aiakq.kernels`. Imports
go one way only, and tests/test_house.py holds them to it:

    cli, terminal  ->  bench, quantizers, inspection, runtime.server  ->  runtime  ->  formats  ->  kernels
    spec, errors, runtime.args: standard library only; everyone may use them

`kernels` imports nothing from aiakq. The registries hold names of modules and import them when asked: `METHODS`
(aiakq/quantizers), `FORMATS` (aiakq/formats), `ARCHITECTURES` (aiakq/runtime/models), `IMPLEMENTATIONS` (kernels).
[adding.md](adding.md) says how to add to each. `tests/` mirrors the tree; `examples/` holds the example model, its
held-out book and the scripts behind `make quickstart`, `quality` and `bench`.
"""


def structure_page() -> str:
    """docs/structure.md: one line per source file, from its docstring."""
    root = DOCS.parent
    lines = [STRUCTURE]
    sources = sorted([*root.glob("aiakq/**/*.py"), *root.glob("kernels/**/*.py")])
    for folder in sorted({path.parent for path in sources}):
        lines += [f"## {folder.relative_to(root)}/", ""]
        for path in sorted(path for path in sources if path.parent == folder):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            if docstring:
                first = " ".join(docstring.split("\n\n")[0].split())
                sentence = re.split(r"(?<=\.) (?=[A-Z`])", first)[0]
                lines.append(f"- `{path.name}` {sentence}")
        lines.append("")
    return "\n".join(lines)


PAGES = {"structure.md": structure_page, "arguments.md": arguments_page, "errors.md": errors_page, "cli.md": cli_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
