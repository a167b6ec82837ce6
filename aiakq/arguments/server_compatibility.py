"""Arguments of ``aiakq serve`` that newer versions of vLLM have. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompatibleServerArguments:
    """Options of the HTTP server, with vLLM's names."""

    default_chat_template_kwargs: dict[str, object] | None = argument(
        None,
        'Default arguments of the chat template, as a JSON object like {"enable_thinking": false}; '
        "chat_template_kwargs of a request take precedence.",
    )
    stream_interval: int = argument(
        1,
        "Number of tokens per chunk of a stream. The first token and the end are always sent at once.",
        low=1,
    )
    enable_log_outputs: bool = argument(
        False, "Log the text of every output when it ends. Needs --enable-log-requests."
    )
    log_config_file: str | None = argument(
        None,
        "JSON file with a configuration of Python's logging, as a dictionary for logging.config.dictConfig. Loggers "
        "that it names (uvicorn.access, uvicorn.error, aiakq.server, aiakq.requests) write where it says.",
    )
    disable_access_log_for_endpoints: list[str] | None = argument(
        None, "Paths whose requests get no line in the access log, like /health,/metrics."
    )
    ssl_ciphers: str | None = argument(
        None, "Cipher suites for TLS 1.2, in OpenSSL's format; uvicorn's default if not given."
    )
