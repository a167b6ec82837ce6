"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from aiakq.errors import AiakqError
from aiakq.server.http.streaming import NamedEvent

#: HTTP status -> error type, where it differs from the default for 4xx and 5xx.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(msgspec.Struct):
    """Type and message of an error."""

    type: str
    message: str


class MessagesError(NamedEvent, kw_only=True):
    """An error as Anthropic's API returns it, as a body or as an event that ends a stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail

    @classmethod
    def from_error(cls, failure: AiakqError) -> Self:
        status = failure.http_status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = str(failure)
        if failure.id == "context_length_exceeded":  # clients match Anthropic's wording to compact the conversation
            message = "prompt is too long: {prompt} tokens > {limit} maximum. ".format(**failure.fields) + message
        return cls(error=MessagesErrorDetail(kind, message))
