"""The arguments of ``aiakq serve``, and the check of everything that the engine and the server take.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import Argument, argument, checked_value, rows_of
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.unsupported import BY_NAME as UNSUPPORTED
from aiakq.arguments.unsupported import refuse
from aiakq.errors import error

#: Environment variable with API keys of the server, joined with commas.
API_KEY_VARIABLE = "AIAKQ_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """Options of the HTTP server."""

    host: str = argument("127.0.0.1", "Address to listen on.")
    port: int = argument(8000, "Port to listen on; 0 takes any free one.", low=0, high=65535)
    served_model_name: list[str] | None = argument(
        None,
        "Names clients use for the model; the folder as given if not given.",
    )
    chat_template: str | None = argument(
        None,
        "Jinja template, as a file or one line; the tokenizer's own if not given.",
    )
    response_role: str = argument("assistant", "Role of chat answers.")
    api_key: list[str] | None = argument(
        None,
        "Key that requests must bring as Authorization: Bearer KEY. Others see it in the list of processes: "
        "--api-key-file and the environment variable AIAKQ_API_KEY keep it from them.",
        environment=False,  # read beside --api-key and the file, see aiakq/server/http/auth.py
    )
    api_key_file: str | None = argument(None, "File with one key per line; lines that begin with # are skipped.")
    allow_no_key: bool = argument(False, "Listen without a key on an address that others can reach.")
    metrics_without_key: bool = argument(False, "Show /metrics without a key.")
    allowed_hosts: list[str] | None = argument(
        None,
        "Names the Host header may hold. On a loopback address only this machine's own if not given.",
    )
    allowed_origins: list[str] | None = argument(
        None,
        "Origins whose web pages may use the server, or *; none if not given.",
    )
    allowed_methods: list[str] | None = argument(None, "Methods allowed to those pages; all if not given.")
    allowed_headers: list[str] | None = argument(None, "Headers allowed to those pages; all if not given.")
    allow_credentials: bool = argument(False, "Let those pages send credentials.")
    ssl_keyfile: str | None = argument(None, "Private key for TLS.")
    ssl_certfile: str | None = argument(None, "Certificate chain for TLS; with it the server speaks HTTPS only.")
    ssl_ca_certs: str | None = argument(None, "Certificates that clients' own certificates are checked against.")
    ssl_cert_reqs: int = argument(0, "Client certificates: 0 none, 1 optional, 2 required.", low=0, high=2)
    max_connections: int = argument(1024, "Connections at a time; more are answered 503.", low=1)
    max_connections_per_address: int = argument(256, "Of those from one address.", low=1)
    header_timeout: float = argument(10.0, "Seconds for a request's headers to arrive.", low=0.1)
    body_timeout: float = argument(30.0, "Seconds for its body.", low=0.1)
    idle_timeout: float = argument(75.0, "Seconds a connection is kept without a request.", low=0.1)
    write_timeout: float = argument(60.0, "Seconds to wait for a client that takes nothing.", low=0.1)
    max_body_bytes: int | None = argument(
        None,
        "Bytes of a request body. 4 MiB, or 8 per token of context if not given.",
        low=1,
    )
    max_num_queued_reqs: int = argument(
        256,
        "Sequences that may wait for a place in the batch; beyond it a request is answered 503 at once.",
        low=1,
    )
    max_num_queued_tokens: int | None = argument(
        None,
        "Prompt tokens of all that wait; beyond it likewise. Four times what the KV pages hold if not given.",
        low=1,
    )
    max_queue_seconds: float = argument(60.0, "Seconds a request may wait; then it is answered 503.", low=0.1)
    max_request_seconds: float = argument(600.0, "Seconds from a request's arrival to its end.", low=0.1)
    step_timeout: float = argument(
        60.0,
        "Seconds for a step of the engine; then its stacks are written to standard error and it is started again.",
        low=0.1,
    )
    first_step_timeout: float = argument(600.0, "The same for an engine's first step.", low=0.1)
    max_engine_restarts: int = argument(
        5,
        "Times within ten minutes that an engine that ended is started again; then the server ends.",
        low=0,
    )
    shutdown_timeout: float = argument(30.0, "Seconds to finish running requests after SIGTERM.", low=0)
    uvicorn_log_level: str = argument(
        "warning",
        "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug"),
    )
    root_path: str = argument("", "Path under which a proxy offers this server.")
    enable_log_requests: bool = argument(False, "Log every request: its prompts and how it is sampled.")
    max_log_len: int | None = argument(
        None,
        "Characters or token ids of a prompt in the log; all if not given.",
        low=0,
    )
    enable_admin_routes: bool = argument(False, "Offer the routes /abort_requests and /reset_prefix_cache.")
    disable_log_stats: bool = argument(False, "No line of statistics every ten seconds.")


SERVER_ARGUMENTS: tuple[Argument, ...] = rows_of(ServerArguments, "server")
ARGUMENTS: tuple[Argument, ...] = ENGINE_ARGUMENTS + SERVER_ARGUMENTS


def checked(given: Mapping[str, Any], *, server: bool) -> dict[str, Any]:
    """All arguments of the engine (and the server) with defaults filled in and every given value checked.

    Those without an effect (unsupported.py) are left out. Raises ``usage`` for an unknown name, ``option_refused`` for
    what is not supported, and ``bad_option`` for a wrong type or value.
    """
    known = {row.name: row for row in (ARGUMENTS if server else ENGINE_ARGUMENTS)}
    refuse(given)
    for name in given:
        if name not in known and name not in UNSUPPORTED:
            raise error("usage", reason=f"There is no engine argument {name!r}.", hint="See docs/arguments.md.")
    return {name: checked_value(row, given.get(name, row.default)) for name, row in known.items()}
