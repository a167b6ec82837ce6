"""The errors of requests for the reasons for which the engine ends a sequence."""

from __future__ import annotations

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.output import OUT_OF_MEMORY
from aiakq.runtime.protocol.step import ADAPTER_FAILED, GRAMMAR_FAILED, MEDIA_FAILED, NOTHING_LEFT


def sequence_error(reason: str) -> AiakqError:
    """Return the error for a sequence that the engine finished with ``reason``."""
    if reason == NOTHING_LEFT:
        return error("nothing_left", reason=reason)
    if reason == GRAMMAR_FAILED:
        return error("grammar_failed")
    if reason == OUT_OF_MEMORY:
        return error("request_memory")
    if reason.startswith(ADAPTER_FAILED):
        return error("adapter_lost", reason=reason.removeprefix(f"{ADAPTER_FAILED}: ").rstrip("."))
    for prefix in MEDIA_FAILED.values():
        if reason.startswith(prefix):
            return error("media_failed", reason=reason.removeprefix(f"{prefix}: ").rstrip("."))
    return error("numerical_error", reason=reason.rstrip("."))
