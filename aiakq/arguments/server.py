"""Arguments of ``aiakq serve``, and the validation of engine and server arguments.

Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

from aiakq.arguments import renamed, unsupported
from aiakq.arguments.argument import Argument, argument, checked_value, part_of, rows_of
from aiakq.arguments.engine import ENGINE_ARGUMENTS, EngineArguments
from aiakq.arguments.lora import checked_modules
from aiakq.arguments.renamed import BY_NAME as RENAMED
from aiakq.arguments.renamed import Renamed
from aiakq.arguments.server_compatibility import CompatibleServerArguments
from aiakq.arguments.spelling import plain_keys
from aiakq.arguments.unsupported import BY_NAME as UNSUPPORTED
from aiakq.arguments.unsupported import refuse
from aiakq.errors import error, short_repr

__all__ = [
    "ARGUMENTS",
    "RENAMED",
    "SERVER_ARGUMENTS",
    "Renamed",
    "ServerArguments",
    "checked",
    "engine_arguments",
    "keywords",
    "notices",
]

#: Environment variable with API keys of the server, separated by commas.
API_KEY_VARIABLE = "AIAKQ_API_KEY"
#: That of vLLM, with one key, which counts if there is no other.
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
#: Variables with keys, which are not passed to the processes of the server.
KEY_VARIABLES = frozenset({API_KEY_VARIABLE, "AIAKQ_ADMIN_API_KEY", VLLM_KEY_VARIABLE})


def _trace_details(given: list[str]) -> list[str]:
    """Validate the parts that --collect-detailed-traces names."""
    for name in given:
        if name not in ("model", "worker", "all"):
            raise ValueError(name)
    return given


#: The address of a server in a web page: an origin, possibly with a path, or a path of the page's own origin.
_SERVER = re.compile(r"(https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?)?(/[A-Za-z0-9._~/-]*)?")


def _servers(given: list[str]) -> list[str]:
    """Validate the servers that --playground-servers names, and remove trailing slashes."""
    for url in given:
        if not url.rstrip("/") or url.startswith("//") or not _SERVER.fullmatch(url):
            raise ValueError(url)
    return [url.rstrip("/") for url in given]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # repr would show keys
class FrontendArguments:
    """Options of the HTTP server."""

    host: str = argument("127.0.0.1", "Address to listen on.")
    port: int = argument(8000, "Port to listen on; 0: any free port.", low=0, high=65535)
    uds: str | None = argument(
        None,
        "Path of a Unix domain socket to listen on instead of --host and --port. Access is controlled by the "
        "permissions of the socket and its folder; no key is required.",
    )
    data_parallel_size: int = argument(
        1,
        "Data-parallel size: number of engines of the same model behind one address, each with its own weights and KV "
        "cache. A request goes to the engine that has cached its prefix, unless that one has much more load. On a CPU, "
        "one per NUMA node is best; on GPUs, each engine uses the GPUs of its ranks.",
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
        "LoRA adapters that requests may name as their model, each as name=folder or as a JSON object with name, path "
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
    chat_template_content_format: Literal["auto", "string", "openai"] = argument(
        "auto",
        "How the content of messages is passed to the chat template: string, openai (a list of parts), or auto, which "
        "finds out what the template takes.",
    )
    response_role: str = argument("assistant", "Role of chat responses.")
    enable_auto_tool_choice: bool = argument(
        False, "Let the model decide whether to call tools: requests may contain tools with tool_choice auto."
    )
    tool_call_parser: str | None = argument(
        None,
        "Parser of the model's tool calls: hermes, llama3_json, mistral, qwen3_coder, ..., see docs/serving.md. If not "
        "given, detected from the chat template.",
    )
    tool_parser_plugin: str | None = argument(
        None, "Python file with custom parsers: TOOL_PARSERS, a dictionary of names and subclasses of ToolParser."
    )
    enable_reasoning: bool = argument(
        False, "Return reasoning separately from the answer; implied by --reasoning-parser."
    )
    reasoning_parser: str | None = argument(
        None,
        "Parser of the model's reasoning: deepseek_r1, qwen3, granite, mistral, glm45 or gptoss. If not given, "
        "--enable-reasoning detects it from the chat template.",
    )
    reasoning_parser_plugin: str | None = argument(
        None,
        "Python file with custom parsers: REASONING_PARSERS, a dictionary of names and subclasses of ReasoningParser.",
    )
    api_key: list[str] | None = argument(
        None,
        "Key that requests must send as Authorization: Bearer KEY. Visible in the list of processes: prefer "
        "--api-key-file or the environment variable AIAKQ_API_KEY.",
        environment=False,  # read in addition to --api-key and the file, see aiakq/server/http/auth.py
    )
    api_key_file: str | None = argument(None, "File with one key per line; lines that start with # are ignored.")
    admin_api_key: list[str] | None = argument(
        None,
        "Key for the routes of --enable-admin-routes, which then accept no other. It is valid on all routes. Prefer "
        "--admin-api-key-file or the environment variable AIAKQ_ADMIN_API_KEY, which lists of processes do not show.",
    )
    admin_api_key_file: str | None = argument(None, "File with one such key per line, as --api-key-file.")
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
        False, "Reload the certificate, key and CA files when they change, for new connections."
    )
    max_connections: int = argument(1024, "Maximum number of open connections; further ones get status 503.", low=1)
    max_connections_per_address: int = argument(256, "Maximum number of open connections from one address.", low=1)
    header_timeout: float = argument(10.0, "Seconds to receive the headers of a request.", low=0.1)
    body_timeout: float = argument(30.0, "Seconds to receive the body of a request.", low=0.1)
    idle_timeout: float = argument(75.0, "Seconds to keep an idle connection open.", low=0.1)
    write_timeout: float = argument(60.0, "Seconds to wait for a client that does not read.", low=0.1)
    max_body_bytes: int | None = argument(
        None,
        "Maximum size of a request body in bytes; 4 MiB, or 8 bytes per token of context, if not given.",
        low=1,
    )
    max_total_body_bytes: int | None = argument(
        None,
        "Maximum total size in bytes of all request bodies in memory, and of the files and pixels of images; 32 times "
        "--max-body-bytes if not given, at least 4 GiB if the model reads images.",
        low=1,
    )
    max_num_queued_reqs: int = argument(
        256,
        "Maximum number of waiting sequences; further requests get status 503 immediately.",
        low=1,
    )
    max_num_queued_tokens: int | None = argument(
        None,
        "Maximum number of prompt tokens of waiting sequences, likewise; four times the KV cache's tokens if not "
        "given.",
        low=1,
    )
    max_queue_seconds: float = argument(60.0, "Seconds a request may wait before it gets status 503.", low=0.1)
    max_request_seconds: float = argument(600.0, "Seconds a request may take in total.", low=0.1)
    fair_share: bool | None = argument(
        None,
        "Schedule fairly between clients, identified by API key or else by address: many or long requests of one do "
        "not delay those of another. If not given: enabled with API keys, disabled without.",
    )
    step_timeout: float = argument(
        60.0,
        "Seconds a step of the engine may take. After that, its stack traces are written to stderr and it is "
        "restarted.",
        low=0.1,
    )
    first_step_timeout: float = argument(600.0, "The same for the first step of an engine.", low=0.1)
    max_engine_restarts: int = argument(
        5,
        "Maximum number of engine restarts within ten minutes; after that the server exits.",
        low=0,
    )
    shutdown_timeout: float = argument(30.0, "Seconds to finish running requests after SIGTERM.", low=0)
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = argument(
        "warning",
        "Log level of the HTTP server.",
    )
    disable_uvicorn_access_log: bool = argument(
        False, "Do not log a line per request, even with --uvicorn-log-level info."
    )
    root_path: str = argument("", "URL path under which a proxy serves this server.")
    sse_keep_alive_interval: float = argument(
        0.0,
        "Seconds without output after which a keep-alive comment is sent on a stream, so that proxies do not close it; "
        "0: never. If this happens before the first output, later failures are reported as an event of the stream.",
        low=0,
    )
    log_format: Literal["text", "json"] = argument(
        "text",
        "text: plain lines; json: one object per line, including one per finished request, see docs/operations.md.",
    )
    otlp_traces_endpoint: str | None = argument(
        None,
        "OpenTelemetry collector to send a trace of every request to: http://HOST:4318/v1/traces, or "
        "grpc://HOST:4317. Needs pip install 'aiakq[traces]'.",
    )
    collect_detailed_traces: list[str] | None = argument(
        None,
        "Parts of a request with separate spans. model: queueing, prefill and decoding in the engine; worker: reading "
        "the body, tokenizing, checking a grammar; all: both.",
        convert=_trace_details,
        expected="model, worker or all",
    )
    enable_log_requests: bool = argument(False, "Log the prompts and sampling parameters of every request.")
    max_log_len: int | None = argument(
        None,
        "Maximum number of characters or token ids of a prompt in the log; all if not given.",
        low=0,
    )
    enable_force_include_usage: bool = argument(
        False, "Send the token counts so far in every chunk of a stream, and a last chunk with the totals."
    )
    enable_prompt_tokens_details: bool = argument(
        True, "Report the prompt tokens taken from the prefix cache in usage.prompt_tokens_details."
    )
    enable_per_request_metrics: bool = argument(
        False,
        "Return the times of a completion or chat request with one sequence in the field metrics; in streams, in the "
        "chunk with the token counts.",
    )
    enable_request_id_headers: bool = argument(
        False, "Use the header X-Request-Id as the id of a request. If off, the server generates all ids."
    )
    return_tokens_as_token_ids: bool = argument(
        False, "Represent tokens as token_id:N in lists of log-probabilities, unless a request overrides it."
    )
    unknown_fields: Literal["ignore", "warn", "refuse"] = argument(
        "ignore",
        "Handling of unknown request fields. ignore: refuse misspelled ones, and those of other servers that would "
        "change the answer; ignore the others, and name them in the response header x-ignored-fields. warn: also "
        "ignore misspelled ones, with one log line per name. refuse: status 400 for all.",
    )
    enable_admin_routes: bool = argument(
        False,
        "Serve the routes /abort_requests, /reset_prefix_cache, /speculation, /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter.",
    )
    enable_tokenizer_info_endpoint: bool = argument(
        False, "Serve the route /tokenizer_info: the tokenizer's configuration and chat template."
    )
    disable_fastapi_docs: bool = argument(False, "Do not serve /docs and /openapi.json.")
    disable_playground: bool = argument(False, "Do not serve the playground at /.")
    playground_servers: list[str] | None = argument(
        None,
        "Other servers to which the playground can send the same request side by side: http://HOST:PORT, or a path on "
        "this server's host. A server with another origin must allow this one with --allowed-origins.",
        convert=_servers,
        expected="a list of addresses like http://127.0.0.1:8001, or paths",
    )
    disable_log_stats: bool = argument(False, "Do not log statistics every ten seconds.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # repr would show keys
class ServerArguments(EngineArguments, FrontendArguments, CompatibleServerArguments):
    """All arguments of ``aiakq serve``: those of the engine and of the HTTP server, validated (``checked``)."""

    @property
    def served_names(self) -> list[str]:
        """Names of the model in requests."""
        return self.served_model_name or [self.model or ""]


SERVER_ARGUMENTS: tuple[Argument, ...] = (
    *rows_of(FrontendArguments, "server"),
    *rows_of(CompatibleServerArguments, "server"),
)
ARGUMENTS: tuple[Argument, ...] = ENGINE_ARGUMENTS + SERVER_ARGUMENTS


def keywords(given: Mapping[str, object]) -> dict[str, Any]:
    """Return keyword arguments with the names that ``checked`` knows, from any spelling of the command line."""
    names = {key: row.name for row in ARGUMENTS for key in row.keys}
    objects = {key for row in ARGUMENTS if row.type is dict for key in row.keys} | UNSUPPORTED.keys()
    values: dict[str, object] = {}
    for key, value in plain_keys(given, objects.__contains__).items():
        name = names.get(key, key)
        if name in values:
            raise error("usage", reason=f"{name} is given twice.", hint="Give it once.")
        values[name] = value
    return values


def notices(given: Mapping[str, object]) -> list[str]:
    """Return a line for each argument that has another name here, or no effect."""
    return [*renamed.notices(given), *unsupported.notices(given)]


@overload
def checked(given: Mapping[str, object], *, server: Literal[True]) -> ServerArguments: ...
@overload
def checked(given: Mapping[str, object], *, server: Literal[False]) -> EngineArguments: ...
def checked(given: Mapping[str, object], *, server: bool) -> EngineArguments:
    """Return all arguments of the engine (and the server) with every given value validated.

    None, like a missing value, stands for the default. Arguments without effect (unsupported.py) are omitted, and old
    names (renamed.py) replaced.

    Raises ``usage`` for an unknown name, ``option_refused`` for an unsupported argument, and ``bad_option`` for a wrong
    type or value.
    """
    given = renamed.replaced(given)
    known = {row.name: row for row in (ARGUMENTS if server else ENGINE_ARGUMENTS)}
    refuse(given)
    for name in given:
        if name not in known and name not in UNSUPPORTED:
            close = difflib.get_close_matches(name, [*known, *UNSUPPORTED], n=1, cutoff=0.7)
            hint = f"Did you mean {close[0]}?" if close else "aiakq serve --help lists them."
            raise error("usage", reason=f"There is no engine argument {short_repr(name)}.", hint=hint)
    values = {name: checked_value(row, given[name]) for name, row in known.items() if given.get(name) is not None}
    return ServerArguments(**values) if server else EngineArguments(**values)


def engine_arguments(given: Mapping[str, object]) -> EngineArguments:
    """Validate keywords for an engine; those of the server are accepted too. Raises as ``checked``."""
    args = checked({name: value for name, value in given.items() if value is not None}, server=True)
    return EngineArguments(**part_of(EngineArguments, args))
