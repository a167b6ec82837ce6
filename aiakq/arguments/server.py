"""Every engine and server argument, once: its name, type, default and help.

The options of ``aiakq serve`` and ``aiakq bench``, the keywords of ``LLM(...)``, their checks and docs/arguments.md all
come from this table: what the engine takes is in engine_args.py, what only other engines take in foreign.py. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiakq.arguments.argument import Argument, checked_value
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.unsupported import BY_NAME as FOREIGN
from aiakq.arguments.unsupported import refuse
from aiakq.errors import error

#: Environment variable with API keys of the server, joined with commas.
API_KEY_VARIABLE = "AIAKQ_API_KEY"

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
    # who may use it
    Argument(
        "api_key",
        list,
        None,
        "Key that requests must bring as Authorization: Bearer KEY. Others see it in the list of processes: "
        "--api-key-file and the environment variable AIAKQ_API_KEY keep it from them.",
        "server",
    ),
    Argument("api_key_file", str, None, "File with one key per line; lines that begin with # are skipped.", "server"),
    Argument("allow_no_key", bool, False, "Listen without a key on an address that others can reach.", "server"),
    Argument("metrics_without_key", bool, False, "Show /metrics without a key.", "server"),
    Argument(
        "allowed_hosts",
        list,
        None,
        "Names the Host header may hold. On a loopback address only this machine's own if not given.",
        "server",
    ),
    Argument(
        "allowed_origins", list, None, "Origins whose web pages may use the server, or *; none if not given.", "server"
    ),
    Argument("allowed_methods", list, None, "Methods allowed to those pages; all if not given.", "server"),
    Argument("allowed_headers", list, None, "Headers allowed to those pages; all if not given.", "server"),
    Argument("allow_credentials", bool, False, "Let those pages send credentials.", "server"),
    Argument("ssl_keyfile", str, None, "Private key for TLS.", "server"),
    Argument("ssl_certfile", str, None, "Certificate chain for TLS; with it the server speaks HTTPS only.", "server"),
    Argument("ssl_ca_certs", str, None, "Certificates that clients' own certificates are checked against.", "server"),
    Argument("ssl_cert_reqs", int, 0, "Client certificates: 0 none, 1 optional, 2 required.", "server", low=0, high=2),
    # limits
    Argument("max_connections", int, 1024, "Connections at a time; more are answered 503.", "server", low=1),
    Argument("max_connections_per_address", int, 256, "Of those from one address.", "server", low=1),
    Argument("header_timeout", float, 10.0, "Seconds for a request's headers to arrive.", "server", low=0.1),
    Argument("body_timeout", float, 30.0, "Seconds for its body.", "server", low=0.1),
    Argument("idle_timeout", float, 75.0, "Seconds a connection is kept without a request.", "server", low=0.1),
    Argument("write_timeout", float, 60.0, "Seconds to wait for a client that takes nothing.", "server", low=0.1),
    Argument(
        "max_body_bytes",
        int,
        None,
        "Bytes of a request body. 4 MiB, or 8 per token of context if not given.",
        "server",
        low=1,
    ),
    Argument(
        "max_num_queued_reqs",
        int,
        256,
        "Sequences that may wait for a place in the batch; beyond it a request is answered 503 at once.",
        "server",
        low=1,
    ),
    Argument(
        "max_num_queued_tokens",
        int,
        None,
        "Prompt tokens of all that wait; beyond it likewise. Four times what the KV pages hold if not given.",
        "server",
        low=1,
    ),
    Argument(
        "max_queue_seconds", float, 60.0, "Seconds a request may wait; then it is answered 503.", "server", low=0.1
    ),
    Argument("max_request_seconds", float, 600.0, "Seconds from a request's arrival to its end.", "server", low=0.1),
    Argument(
        "step_timeout",
        float,
        60.0,
        "Seconds for a step of the engine; then its stacks are written to standard error and it is started again.",
        "server",
        low=0.1,
    ),
    Argument("first_step_timeout", float, 600.0, "The same for an engine's first step.", "server", low=0.1),
    Argument(
        "max_engine_restarts",
        int,
        5,
        "Times within ten minutes that an engine that ended is started again; then the server ends.",
        "server",
        low=0,
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
