"""Write the pages that come from code: ``make docs``.

docs/arguments.md, errors.md, formats.md and routes.md are read in the repository and committed; tests/test_docs.py
fails when one is not what this would write. docs/cli.md, docs/modules.md and the manual page are built and not
committed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from aiakq.arguments.argument import Argument
from aiakq.arguments.commands import COMMANDS, CommandArguments
from aiakq.arguments.environment import SETTINGS
from aiakq.arguments.renamed import RENAMED, VALUES
from aiakq.arguments.server import ARGUMENTS
from aiakq.arguments.unsupported import UNSUPPORTED
from aiakq.constraints import LIMITED_BY
from aiakq.errors import REGISTRY
from aiakq.server.api.generation_request import GenerationRequest
from aiakq.server.api.openapi import BODY_ERRORS, COMMON_ERRORS, KEY_ERRORS, request_schema
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.routes import ROUTE_MODULES, Route
from aiakq.server.api.translated import Translated
from aiakq.server.api.unsupported_fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS, UnsupportedField

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

from format_page import formats_page  # noqa: E402
from manual import COMMAND_NAMES, manual_page  # noqa: E402 - beside this file, wherever it is run from

_GROUPS = {
    "model": "The model, its weights, device and arithmetic.",
    "text": "The tokenizer, and defaults of structured output.",
    "memory": "Context length, and size and storage of the KV cache.",
    "scheduling": "Limits of a step, order of requests, and speculative decoding.",
    "server": "The HTTP server; for `aiakq serve` only.",
}

_ARGUMENTS = """\
# Arguments

Written by `make docs` from the tables in `aiakq/arguments/`.

## Where values come from

Options of all commands can be set in three places, in order of precedence:

1. on the command line: `--max-model-len 4096`;
2. as an environment variable: `AIAKQ_MAX_MODEL_LEN=4096`;
3. in the YAML file that `--config FILE` or `AIAKQ_CONFIG` names: `max-model-len: 4096`, one option per line, with
   dashes or underscores.

A variable has the same value as on the command line: `true`, `false`, `1` or `0` for a switch, and list entries
separated by commas. An empty variable counts as unset. A variable applies to every command that has the option:
`AIAKQ_DTYPE` to `serve`, `quantize` and `eval`. `LLM(...)` takes the arguments of the engine as keywords, with
underscores for dashes, and reads no variables.

These variables do not correspond to an option:

| variable | what it does |
|---|---|
{variables}

Any other variable that starts with `AIAKQ_` causes a warning with the closest name.

Output is coloured on a terminal, unless `TERM` is `dumb` or `CLICOLOR` is 0. `FORCE_COLOR` and `CLICOLOR_FORCE` enable
colours elsewhere too, such as in CI logs, where progress remains plain lines; `NO_COLOR` disables them.

For a service named `aiakq`, Kubernetes sets `AIAKQ_PORT=tcp://...` in every pod of the namespace, which causes an error
that names the variable: rename the service, or set `enableServiceLinks: false`.

## Engine and server

Options of `aiakq serve` and, except for the server group, of `aiakq bench latency`, `throughput` and `serve`; keywords
of `LLM(...)`. Names and defaults follow vLLM's where those exist. {works} work; [{accepted} more are accepted without
effect and {refused} are refused](#accepted-without-effect-or-refused).
"""

_UNSUPPORTED = """
## Accepted without effect, or refused

These arguments of vLLM and AIAK are not listed in `--help`, but scripts and configuration files that use them still
start: default values are accepted silently, and any other value prints a notice that it has no effect, or is refused.
"""

_RENAMED = """
## Other names

These names and values of vLLM have another one here. They are replaced, with a notice.
"""


def arguments_page() -> str:
    """docs/arguments.md from the tables in aiakq/arguments."""
    accepted, refused = ([row for row in UNSUPPORTED if row.status == which] for which in ("no effect", "refused"))
    variables = "\n".join(f"| `{name}` | {text} |" for name, text in SETTINGS.items())
    counts = {"works": len(ARGUMENTS), "accepted": len(accepted), "refused": len(refused)}
    lines = [_ARGUMENTS.format(variables=variables, **counts).rstrip()]
    for group, about in _GROUPS.items():
        lines += [
            "",
            f"### {group.capitalize()}",
            "",
            about,
            "",
            *_table(row for row in ARGUMENTS if row.group == group),
        ]
    for name, command in COMMANDS.items():
        if command.own_rows:
            lines += ["", f"## aiakq {name}", "", *_about(command), *_table(command.own_rows)]
    lines += [_UNSUPPORTED, "| option | accepted, but it has no effect: |", "|---|---|"]
    lines += [f"| `{row.flag}` | {row.reason} |" for row in accepted]
    lines += ["", "| option | refused, except for | because |", "|---|---|---|"]
    lines += [f"| `{row.flag}` | {', '.join(f'`{v}`' for v in row.defaults)} | {row.reason} |" for row in refused]
    lines += [_RENAMED, "| option | replaced by |", "|---|---|"]
    lines += [f"| `{row.flag}` | `{row.replacement}` |" for row in RENAMED]
    for (name, value), new in VALUES.items():
        flag = "--" + name.replace("_", "-")
        lines.append(f"| `{flag} {value}` | `{flag} {new}` |")
    return "\n".join(lines) + "\n"


def _about(command: CommandArguments) -> list[str]:
    return ["Besides the arguments of the engine:", ""] if command.engine else []


def _table(rows: Iterable[Argument]) -> list[str]:
    return ["| option | default | what it does |", "|---|---|---|", *map(_argument_row, rows)]


def _argument_row(argument: Argument) -> str:
    flags = [argument.metavar or argument.name.upper()] if argument.positional else list(argument.all_flags)
    if argument.type is bool:
        flags.append(argument.off_flag)
    name = ", ".join(f"`{flag}`" for flag in flags)
    text = argument.help.replace("|", "\\|")
    if argument.suffixes:
        text += " Like 4096, 25.6k, 32K."
    if argument.choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in argument.choices) + "."
    bounds = [f"above {argument.above:g}"] if argument.above is not None else []
    bounds += [f"at least {argument.low:g}"] if argument.low is not None else []
    bounds += [f"at most {argument.high:g}"] if argument.high is not None and argument.high < 2**62 else []
    if bounds:
        text += f" ({', '.join(bounds)})"
    return f"| {name} | {_default(argument)} | {text} |"


def _default(argument: Argument) -> str:
    value = argument.default
    if argument.required:
        return "required"
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def errors_page() -> str:
    """docs/errors.md from the registry in aiakq/errors."""
    lines = [
        "# Errors",
        "",
        "Written by `make docs` from `aiakq/errors`. On the command line an error is one line,",
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
        "6 conflict, 7 environment, 8 numeric failure, 9 worker failure, 10 a gate failed, 11 undecided comparison,",
        "130 and 143 signals.",
    ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """docs/cli.md from the commands' own --help."""
    lines = ["# Command line", "", "Written by `make docs`: the `--help` of every command."]
    for command in ("", *COMMAND_NAMES):
        words = ["aiakq", *command.split()]
        lines += ["", f"## {' '.join(words)}", "", "```", help_text(words[1:]), "```"]
    return "\n".join(lines) + "\n"


def help_text(words: list[str]) -> str:
    """``aiakq WORDS --help`` at 100 columns, without colors or trailing blanks."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "TERMINAL_WIDTH": "100"}
    script = Path(sys.executable).with_name("aiakq")
    done = subprocess.run([str(script), *words, "--help"], capture_output=True, text=True, env=environment, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def modules_page() -> str:
    """docs/modules.md: one line per source file, from its docstring."""
    root = DOCS.parent
    lines = ["# Modules", "", "Written by `make docs` from the first line of each source file.", ""]
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


_ROUTES = """\
# Routes

Written by `make docs` from the tables of routes in `aiakq/server/`. A running server returns the same as
`/openapi.json`, with the limits of its model; `/docs` shows it as a page. [serving.md](serving.md) describes how
requests are handled, [adding.md](adding.md) how to add a route.
"""

#: Bounds that depend on the loaded model, in words.
_LIMITED_BY = {
    "token_id": "token ids",
    "max_tokens": "as many as the context has room for",
    "logprobs": "0 to `--max-logprobs`",
    "priority": "",
    "model": "",
}


def routes_page() -> str:
    """docs/routes.md from the tables of routes in aiakq/server/api."""
    modules = [name for name in ROUTE_MODULES if ROUTE_MODULES.package(name) is None]
    routes = [route for name in modules for route in ROUTE_MODULES.load(name).ROUTES]
    lines = [_ROUTES, "| route | what it does | needs a key |", "|---|---|---|"]
    for route in routes:
        text = route.summary
        if route.enabled_by:
            text = f"With `{_flag(route.enabled_by)}`. {text}"
        if route.disabled_by:
            text = f"Without `{_flag(route.disabled_by)}`. {text}"
        key = f"yes, without `{_flag(route.needs_key)}`" if isinstance(route.needs_key, str) else "yes"
        lines.append(f"| `{_methods(route)} {route.openapi_path}` | {text} | {key if route.needs_key else 'no'} |")
    lines += ["| `GET /openapi.json` | Without `--disable-fastapi-docs`. The OpenAPI document. | yes |"]
    lines += [
        "",
        "## Request fields",
        "",
        "A field that is absent or null has its default. Those of sampling parameters may be changed by the model's",
        "generation_config.json.",
    ]
    models = [(route, model) for route in routes for model in (*route.request, *([route.form] if route.form else ()))]
    fields = {model: request_fields(model) for _, model in models}
    generating = [fields[model] for _, model in models if issubclass(model, GenerationRequest)]
    shared = {name: field for name, field in generating[0].items() if all(field == own.get(name) for own in generating)}
    lines += ["", "### Completions and chat", "", *_fields_table(shared)]
    for route, model in models:
        own = {name: field for name, field in fields[model].items() if not route.generates or name not in shared}
        lines += ["", f"### `{_methods(route)} {route.openapi_path}`: {model.__name__}", "", *_fields_table(own)]
        if issubclass(model, Translated):
            same = [name for name in fields[model] if name not in own]
            lines += ["", f"Also, as in chat: {_names(same)}."] if same else []
            lines += _undeclared(model.ignored_fields, model.unsupported_fields)
    lines += ["", "### All other requests", *_undeclared(IGNORED_FIELDS, UNSUPPORTED_FIELDS)]
    lines += ["", "## Errors", "", "[errors.md](errors.md) explains them.", "", "| route | errors |", "|---|---|"]
    lines += [f"| every route | {_names(COMMON_ERRORS)}; with keys {_names(KEY_ERRORS)} |"]
    lines += [f"| routes with a request body, also | {_names(BODY_ERRORS)} |"]
    lines += [f"| `{route.openapi_path}`, also | {_names(route.errors)} |" for route in routes if route.errors]
    return "\n".join(lines) + "\n"


def _undeclared(ignored: Iterable[str], unsupported: Mapping[str, UnsupportedField]) -> list[str]:
    """The fields without effect, and a table of those that are refused."""
    lines = ["", f"Accepted and ignored: {_names(sorted(ignored))}.", ""]
    lines += ["| field that is refused | values accepted, besides null | because |", "|---|---|---|"]
    for name, field in unsupported.items():
        lines.append(f"| `{name}` | {_names(map(json.dumps, field.neutral))} | {field.reason} |")
    return lines


def request_fields(model: type[RequestModel]) -> dict[str, dict[str, Any]]:
    """Name -> JSON schema of the declared fields of a request model."""
    properties = request_schema(model)["properties"]
    return {name: properties[name] for name in model.model_fields}


def _fields_table(fields: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| field | default | value | what it does |", "|---|---|---|---|"]
    for name, field in fields.items():
        branches = [branch for branch in field.get("anyOf", [field]) if branch.get("type") != "null"]
        values = ", or ".join(filter(None, dict.fromkeys(map(_value, branches)))).replace("|", "\\|")
        default = "" if field.get("default") is None else f"`{json.dumps(field['default'])}`"
        lines.append(
            f"| `{name}` | {default} | {values} | {field.get('description', '').replace('|', chr(92) + '|')} |"
        )
    return lines


def _value(schema: dict[str, Any]) -> str:
    """The values a schema allows, in words."""
    kind = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}.get(
        schema.get("type", ""), schema.get("type", "")
    )
    if kind == "array":
        item = _value(schema.get("items", {})) or "entries"
        kind = f"list of {item}" + (f", at most {schema['maxItems']}" if "maxItems" in schema else "")
    if LIMITED_BY in schema:
        return ", ".join(filter(None, (kind, _LIMITED_BY[schema[LIMITED_BY]])))
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if low is not None and high is not None and abs(high) < 2**31:
        return f"{kind}, {'above ' if 'exclusiveMinimum' in schema else ''}{low:g} to {high:g}"
    if low is not None and abs(low) < 2**31:
        return f"{kind}, {low:g} or more"
    return kind


def _methods(route: Route) -> str:
    return " or ".join(route.methods)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def alert_rules() -> str:
    """The alerts for the Prometheus operator, from examples/deploy/prometheus/alerts.yml."""
    rules = yaml.safe_load((DOCS.parent / "examples/deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "aiakq"},
        "spec": json.loads(json.dumps(rules)),  # without references between equal parts
    }
    head = '# Written by "make docs" from ../../prometheus/alerts.yml.\n'
    return head + str(yaml.safe_dump(document, sort_keys=False, width=110))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


COMMITTED = {
    "arguments.md": arguments_page,
    "errors.md": errors_page,
    "formats.md": formats_page,
    "routes.md": routes_page,
    "../examples/deploy/kubernetes/monitoring/alerts.yaml": alert_rules,
}
BUILT = {"modules.md": modules_page, "cli.md": cli_page, "aiakq.1": manual_page}

if __name__ == "__main__":
    for name, page in {**COMMITTED, **BUILT}.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
