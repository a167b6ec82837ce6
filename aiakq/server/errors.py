"""Conversion of exceptions to the errors that clients receive."""

from __future__ import annotations

from aiakq.errors import AiakqError, error


def copy_error(failure: AiakqError) -> AiakqError:
    """Return a new instance, because one raised for many requests would accumulate their tracebacks."""
    return error(failure.id, **failure.fields)


def as_aiakq_error(exception: BaseException) -> AiakqError:
    """Return ``exception`` if it is an AiakqError, else ``request_failed`` without details."""
    if isinstance(exception, AiakqError):
        return exception
    return error("request_failed", reason="an internal error")
