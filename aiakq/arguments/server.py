"""Arguments of ``aiakq serve``, and the validation of engine and server arguments.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import Argument, argument, checked_value, rows_of
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.lora import checked_modules
from aiakq.arguments.unsupported import BY_NAME as UNSUPPORTED
from aiakq.arguments.unsupported import refuse
from aiakq.errors import error

#: Environment variable with API keys of the server, joined with commas.
API_KEY_VARIABLE = "AIAKQ_API_KEY"


def _trace_details(given: list[str]) -> list[str]:
    """The parts that --collect-detailed-traces names."""
    for name in given:
        if name not in ("model", "worker", "all"):
            raise ValueError(name)
    return given


#: A server as a web page names it: an origin, perhaps with a path, or a path of the page's own origin.
_SERVER = re.compile(r"(https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?)?(/[A-Za-z0-9._~/-]*)?")


def _servers(given: list[str]) -> list[str]:
    """The servers that --playground-servers names, without a slash at the end."""
    for url in given:
        if not url.rstrip("/") or url.startswith("//") or not _SERVER.fullmatch(url):
            raise ValueError(url)
    return [url.rstrip("/") for url in given]


@dataclass(init=False, repr=False, eq=False)  # only its fields are used: the server takes a mapping
class ServerArguments:
    """Options of the HTTP server."""

    host: str = argument("127.0.0.1", "Address to listen on.")
    port: int = argument(8000, "Port to listen on; 0 takes any free one.", low=0, high=65535)
    uds: str | None = argument(
        None,
        "Path of a Unix domain socket to listen on instead of --host and --port. Who may connect is decided by the "
        "permissions of the socket and its folder; no key is required.",
    )
    data_parallel_size: int = argument(
        1,
        "Engines of the same model behind one address, each with weights and KV pages of its own. A request goes to "
        "the one that has computed its beginning, unless that has much more to do. On a CPU, one per NUMA node pays; "
        "on GPUs, each has those of its ranks.",
        flags=("--data-parallel-size", "-dp"),
        low=1,
        high=64,
    )
    served_model_name: list[str] | None = argument(
        None,
        "Names of the model in requests; the value of --model if not given.",
    )
    lora_modules: list[str] | None = argument(
        None,
        "LoRA adapters that requests may name as their model, each as name=folder or as a JSON object of name, path "
        "and base_model_name. Needs --enable-lora.",
        separator=";",
        convert=checked_modules,
        expected='name=path, or {"name": "...", "path": "...", "base_model_name": "..."}',
    )
    lora_root: str | None = argument(
        None,
        "Folder from which /v1/load_lora_adapter may load adapters, with --enable-admin-routes.",
    )
    chat_template: str | None = argument(
        None,
        "Jinja template, as a file or a single line; the tokenizer's own if not given.",
    )
    response_role: str = argument("assistant", "Role of chat responses.")
    enable_auto_tool_choice: bool = argument(
        False, "Let the model decide to call tools: requests may have tools, with tool_choice auto."
    )
    tool_call_parser: str | None = argument(
        None,
        "How the model writes calls of tools: hermes, llama3_json, mistral, qwen3_coder, ..., see docs/serving.md. If "
        "not given, found from the chat template.",
    )
    tool_parser_plugin: str | None = argument(
        None, "Python file with parsers of your own: TOOL_PARSERS, a dictionary of names and subclasses of ToolParser."
    )
    enable_reasoning: bool = argument(
        False, "Return reasoning apart from the answer; --reasoning-parser alone does the same."
    )
    reasoning_parser: str | None = argument(
        None,
        "How the model marks its reasoning: deepseek_r1, qwen3, granite, mistral, glm45 or gptoss. If not given, with "
        "--enable-reasoning found from the chat template.",
    )
    reasoning_parser_plugin: str | None = argument(
        None,
        "Python file with parsers of your own: REASONING_PARSERS, a dictionary of names and subclasses of "
        "ReasoningParser.",
    )
    api_key: list[str] | None = argument(
        None,
        "Key that requests must send as Authorization: Bearer KEY. Visible in the list of processes: prefer "
        "--api-key-file or the environment variable AIAKQ_API_KEY.",
        environment=False,  # read beside --api-key and the file, see aiakq/server/http/auth.py
    )
    api_key_file: str | None = argument(None, "File with one key per line; lines that start with # are ignored.")
    allow_no_key: bool = argument(False, "Allow listening on a public address without a key.")
    metrics_without_key: bool = argument(False, "Serve /metrics without a key.")
    allowed_hosts: list[str] | None = argument(
        None,
        "Allowed values of the Host header. If not given: on a loopback address only this machine's own names.",
    )
    allowed_origins: list[str] | None = argument(
        None,
        "Origins allowed by CORS, or *; none if not given.",
    )
    allowed_methods: list[str] | None = argument(None, "Methods allowed by CORS; all if not given.")
    allowed_headers: list[str] | None = argument(None, "Headers allowed by CORS; all if not given.")
    allow_credentials: bool = argument(False, "Allow credentials in CORS requests.")
    ssl_keyfile: str | None = argument(None, "Private key for TLS.")
    ssl_certfile: str | None = argument(None, "Certificate chain for TLS. If given, the server accepts HTTPS only.")
    ssl_ca_certs: str | None = argument(None, "CA certificates to verify client certificates with.")
    ssl_cert_reqs: int = argument(0, "Client certificates: 0 none, 1 optional, 2 required.", low=0, high=2)
    enable_ssl_refresh: bool = argument(
        False, "Read the certificate, key and CA files again when they change; new connections then use them."
    )
    max_connections: int = argument(1024, "Most open connections; further ones get status 503.", low=1)
    max_connections_per_address: int = argument(256, "Most open connections from one address.", low=1)
    header_timeout: float = argument(10.0, "Seconds to receive the headers of a request.", low=0.1)
    body_timeout: float = argument(30.0, "Seconds to receive the body of a request.", low=0.1)
    idle_timeout: float = argument(75.0, "Seconds to keep an idle connection open.", low=0.1)
    write_timeout: float = argument(60.0, "Seconds to wait for a client that does not read.", low=0.1)
    max_body_bytes: int | None = argument(
        None,
        "Largest request body in bytes; 4 MiB, or 8 bytes per token of context, if not given.",
        low=1,
    )
    max_total_body_bytes: int | None = argument(
        None,
        "Most bytes of request bodies in memory, those of all requests together; 32 times --max-body-bytes if not "
        "given.",
        low=1,
    )
    max_num_queued_reqs: int = argument(
        256,
        "Most waiting sequences; further requests get status 503 at once.",
        low=1,
    )
    max_num_queued_tokens: int | None = argument(
        None,
        "Most prompt tokens of waiting sequences, likewise; four times the tokens in KV pages if not given.",
        low=1,
    )
    max_queue_seconds: float = argument(60.0, "Seconds a request may wait before it gets status 503.", low=0.1)
    max_request_seconds: float = argument(600.0, "Seconds a request may take in all.", low=0.1)
    fair_share: bool | None = argument(
        None,
        "Share the engine between clients, by API key, else by address: many or long requests of one do not keep "
        "another waiting. If not given: with API keys yes, without them no.",
    )
    step_timeout: float = argument(
        60.0,
        "Seconds a step of the engine may take. After that its stacks are written to stderr and it is restarted.",
        low=0.1,
    )
    first_step_timeout: float = argument(600.0, "The same for the first step of an engine.", low=0.1)
    max_engine_restarts: int = argument(
        5,
        "Most restarts of the engine within ten minutes; after that the server exits.",
        low=0,
    )
    shutdown_timeout: float = argument(30.0, "Seconds to finish running requests after SIGTERM.", low=0)
    uvicorn_log_level: str = argument(
        "warning",
        "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug"),
    )
    disable_uvicorn_access_log: bool = argument(
        False, "Log no line for each request, not even with --uvicorn-log-level info."
    )
    root_path: str = argument("", "URL path under which a proxy serves this server.")
    sse_keep_alive_interval: float = argument(
        0.0,
        "Seconds without output after which a stream gets a comment, so that no proxy takes it for dead; 0: never. A "
        "stream that waited so long for its first output has begun, and reports later failures as an event.",
        low=0,
    )
    log_format: str = argument(
        "text",
        "text: lines to read; json: one object per line, and one for every finished request, see docs/operations.md.",
        choices=("text", "json"),
    )
    otlp_traces_endpoint: str | None = argument(
        None,
        "Collector that gets a trace of every request, with OpenTelemetry's protocol: http://HOST:4318/v1/traces, or "
        "grpc://HOST:4317. Needs pip install 'aiakq[traces]'.",
    )
    collect_detailed_traces: list[str] | None = argument(
        None,
        "Parts of a request with spans of their own. model: waiting, prefill and decoding in the engine; worker: "
        "reading the body, tokenizing, checking a grammar; all: both.",
        convert=_trace_details,
        expected="model, worker or all",
    )
    enable_log_requests: bool = argument(False, "Log the prompts and sampling parameters of every request.")
    max_log_len: int | None = argument(
        None,
        "Most characters or token ids of a prompt in the log; all if not given.",
        low=0,
    )
    enable_force_include_usage: bool = argument(
        False, "End every stream with a chunk of token counts, as if it had asked for include_usage."
    )
    enable_prompt_tokens_details: bool = argument(
        True, "Count the prompt tokens taken from the prefix cache in usage.prompt_tokens_details."
    )
    enable_request_id_headers: bool = argument(
        False, "Take the id of a request from its header X-Request-Id. If off, the server makes all ids."
    )
    return_tokens_as_token_ids: bool = argument(
        False, "Call tokens token_id:N in lists of log-probabilities, unless a request says otherwise."
    )
    unknown_fields: str = argument(
        "refuse",
        "Fields of requests that are not known. refuse: status 400; warn: they are ignored, and so are hints such as "
        "reasoning_effort, with one line in the log for each name.",
        choices=("refuse", "warn"),
    )
    enable_admin_routes: bool = argument(
        False,
        "Serve the routes /abort_requests, /reset_prefix_cache, /v1/load_lora_adapter and /v1/unload_lora_adapter.",
    )
    enable_tokenizer_info_endpoint: bool = argument(
        False, "Serve the route /tokenizer_info: the tokenizer's configuration and chat template."
    )
    disable_fastapi_docs: bool = argument(False, "Do not serve /docs and /openapi.json.")
    disable_playground: bool = argument(False, "Do not serve the playground at /.")
    playground_servers: list[str] | None = argument(
        None,
        "Other servers that the playground can send the same request to, side by side: http://HOST:PORT, or a path of "
        "this server's own host. One with another origin must allow the page's with --allowed-origins.",
        convert=_servers,
        expected="a list of addresses like http://127.0.0.1:8001, or paths",
    )
    disable_log_stats: bool = argument(False, "Do not log statistics every ten seconds.")


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
            raise error("usage", reason=f"There is no engine argument {name!r}.", hint="aiakq serve --help lists them.")
    return {name: checked_value(row, given.get(name, row.default)) for name, row in known.items()}
