"""Every engine and server argument, once: its name, type, default and help.

The options of ``aiakq serve`` and ``aiakq bench``, the keywords of ``LLM(...)``, their checks and docs/arguments.md all
come from this table: what the engine takes is in engine_args.py, what only other engines take in foreign.py. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiakq.errors import error
from aiakq.runtime.argument import Argument, checked_value
from aiakq.runtime.engine_args import ENGINE_ARGUMENTS
from aiakq.runtime.foreign import BY_NAME as FOREIGN
from aiakq.runtime.foreign import refuse

SERVER_ARGUMENTS: tuple[Argument, ...] = (
    Argument("host", str, "127.0.0.1", "Address to listen on.", "server"),
    Argument("port", int, 8000, "Port to listen on; 0 takes any free one.", "server", low=0, high=65535),
    Argument(
        "served_model_name", list, None, "Names clients use for the model; the folder as given if not given.", "server"
    ),
    Argument(
        "chat_template", str, None, "Jinja template, as a file or one line; the tokenizer's own if not given.", "server"
    ),
    Argument("response_role", str, "assistant", "Role of chat answers.", "server"),
    Argument(
        "max_num_queued_reqs",
        int,
        1024,
        "Sequences that may wait for their first step; beyond it a request is answered 503 at once.",
        "server",
        low=1,
    ),
    Argument("shutdown_timeout", float, 30.0, "Seconds to finish running requests after SIGTERM.", "server", low=0),
    Argument(
        "uvicorn_log_level",
        str,
        "warning",
        "Log level of the HTTP server.",
        "server",
        choices=("critical", "error", "warning", "info", "debug"),
    ),
    Argument("root_path", str, "", "Path under which a proxy offers this server.", "server"),
    Argument("enable_log_requests", bool, False, "Log every request: its prompts and how it is sampled.", "server"),
    Argument(
        "max_log_len", int, None, "Characters or token ids of a prompt in the log; all if not given.", "server", low=0
    ),
    Argument(
        "enable_admin_routes",
        bool,
        False,
        "Offer the routes /abort_requests and /reset_prefix_cache.",
        "server",
    ),
    Argument("disable_log_stats", bool, False, "No line of statistics every ten seconds.", "server"),
)

ARGUMENTS: tuple[Argument, ...] = ENGINE_ARGUMENTS + SERVER_ARGUMENTS

BY_NAME = {argument.name: argument for argument in ARGUMENTS}


def engine_arguments() -> Iterable[Argument]:
    """The rows that ``LLM(...)`` takes."""
    return (argument for argument in ARGUMENTS if argument.group != "server")


def checked(given: Mapping[str, Any], *, server: bool) -> dict[str, Any]:
    """All arguments with defaults filled in and every given value checked.

    Those of other engines (foreign.py) are left out. Raises ``usage`` for an unknown name, ``option_refused`` for what
    there is not, and ``bad_option`` for a wrong type or value.
    """
    known = {argument.name: argument for argument in ARGUMENTS if server or argument.group != "server"}
    refuse(given)
    for name in given:
        if name not in known and name not in FOREIGN:
            raise error("usage", reason=f"There is no engine argument {name!r}.", hint="See docs/arguments.md.")
    return {name: checked_value(argument, given.get(name, argument.default)) for name, argument in known.items()}
