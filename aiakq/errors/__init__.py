"""Registry of all user-facing errors: code, exit code, HTTP status, message and remedy.

Every failure a user can cause is an entry here, with the exit code of the command line and the HTTP status of
the server. Raise one with ``raise error("model_missing", path=path)``; the fields fill the two templates.
Anything else that escapes is a bug in aiakq (exit code 1, HTTP 500).

Standard library only: the command line imports this module before anything heavy.
"""

from __future__ import annotations

from typing import Any

from aiakq.errors.adapter_errors import ADAPTER_ERRORS
from aiakq.errors.kind import (
    BAD_INPUT,
    BUG,
    CONFLICT,
    ENVIRONMENT,
    GATE,
    NUMERIC,
    RESOURCES,
    UNDECIDED,
    UNSAFE,
    USAGE,
    WORKER,
    ErrorKind,
)
from aiakq.errors.model_errors import COMMAND_ERRORS, FOLDER_ERRORS, QUANTIZE_ERRORS
from aiakq.errors.serving_errors import CONNECTION_ERRORS, RANK_ERRORS, REQUEST_ERRORS, RUNTIME_ERRORS
from aiakq.errors.values import MessageFormatter, as_text, short_repr

__all__ = [
    "BAD_INPUT",
    "BUG",
    "CONFLICT",
    "ENVIRONMENT",
    "GATE",
    "NUMERIC",
    "REGISTRY",
    "RESOURCES",
    "UNDECIDED",
    "UNSAFE",
    "USAGE",
    "WORKER",
    "AiakqError",
    "AiakqValueError",
    "ErrorKind",
    "error",
    "one_line",
    "short_repr",
]

_FORMATTER = MessageFormatter()

#: Every error by its id.
REGISTRY: dict[str, ErrorKind] = {
    **COMMAND_ERRORS,
    **FOLDER_ERRORS,
    **QUANTIZE_ERRORS,
    **RUNTIME_ERRORS,
    **RANK_ERRORS,
    **CONNECTION_ERRORS,
    **REQUEST_ERRORS,
    **ADAPTER_ERRORS,
}
#: Errors with status 503 that are usually resolved within a second.
_OVER_SOON = frozenset({"bodies_too_large", "overloaded", "queue_timeout", "too_many_connections"})


class AiakqError(Exception):
    """A failure with an entry in ``REGISTRY``. Its text is one line, the message and the remedy, then the details."""

    def __init__(self, id: str, **fields: Any) -> None:
        kind = REGISTRY[id]
        self.id = id
        self.kind = kind
        self.fields = fields
        self.param: str | None = fields.get("param")
        self.message = _FORMATTER.vformat(kind.message, (), fields)
        self.remedy = _FORMATTER.vformat(kind.remedy, (), fields)
        self.exit_code = kind.exit_code
        self.http_status = kind.http_status
        self.details = _FORMATTER.vformat(kind.details, (), fields)
        super().__init__(f"{self.message} {self.remedy}\n{self.details}".rstrip())

    @property
    def retry_after(self) -> int | None:
        """Seconds for the header Retry-After; None if a retry does not help."""
        if self.http_status != 503:
            return None
        return 1 if self.id in _OVER_SOON else 10

    @property
    def plain_fields(self) -> dict[str, object]:
        """The fields, with values that MessagePack cannot encode as text, to rebuild the error in another process."""

        def is_plain(value: object) -> bool:
            return isinstance(value, (str, float, type(None))) or (isinstance(value, int) and value.bit_length() < 64)

        return {name: value if is_plain(value) else as_text(value) for name, value in self.fields.items()}

    def body(self) -> dict[str, object]:
        """Return the JSON body of an HTTP response, in the format that OpenAI clients parse."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind.type,
                "param": self.param,
                "code": self.id,
            }
        }


class AiakqValueError(AiakqError, ValueError):
    """A failure for which vLLM raises ValueError: an invalid argument, sampling parameter or prompt."""


_VALUE_ERRORS = frozenset(
    {
        *(
            "usage",
            "bad_option",
            "option_refused",
            "option_conflict",
            "quantization_mismatch",
            "rounding_at_load",
            "model_unsupported",
        ),
        *("remote_code", "no_memory", "value_out_of_range", "invalid_type", "unsupported_parameter", "empty_prompt"),
        *("invalid_token_id", "too_many_prompts", "context_length_exceeded", "no_chat_template", "chat_template"),
        *(
            "template_loses",
            "template_loses_users",
            "template_unusable",
            "no_tokenizer",
            "grammar_not_enforceable",
            "unknown_field",
            "media_refused",
        ),
        "unsupported",
        "task_mismatch",
    }
)


def error(id: str, **fields: Any) -> AiakqError:
    """Return (do not raise) the error ``id``. Raises KeyError for an id that is not in the registry."""
    return (AiakqValueError if id in _VALUE_ERRORS else AiakqError)(id, **fields)


#: What torch's CPU allocator and cuBLAS say in exceptions of no special type.
_FAILED_ALLOCATIONS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def memory_error(failure: BaseException) -> AiakqError | None:
    """Return ``out_of_memory`` for a failed allocation, also for those of torch; None for any other failure."""
    text = str(failure).strip()
    found = [text.find(message) for message in _FAILED_ALLOCATIONS if message in text]
    if isinstance(failure, RuntimeError) and found:
        text = text[found[0] :]
    elif not isinstance(failure, MemoryError) and type(failure).__name__ != "OutOfMemoryError":
        return None
    lines = text.splitlines()
    return error("out_of_memory", reason=lines[0].rstrip(".")[:400] if lines else "an allocation failed")


def first_line(failure: BaseException | str, otherwise: str = "") -> str:
    """Return the first line of what a foreign exception says, without a full stop, for use as a reason.

    otherwise  what to return if it says nothing; the name of its type if empty.
    """
    lines = str(failure).strip().splitlines()
    return lines[0].rstrip(".") if lines else otherwise or type(failure).__name__


def one_line(failure: BaseException) -> str:
    """Return the type and message of a foreign exception as one line, for use as a reason."""
    text = " ".join(str(failure).split()) or "no message"
    return f"{type(failure).__name__}: {text[:400]}"
