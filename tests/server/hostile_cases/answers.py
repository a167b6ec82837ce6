"""What an expected response is."""

from __future__ import annotations

import json
import re

from raw_http import Response

from hostile_cases.requests import Expected

KEYS = {"message", "type", "param", "code"}
#: Keys of errors of the Messages API.
MESSAGES_KEYS = {"message", "type"}
LEAKS = re.compile(r"Traceback|pydantic|site-packages|\.py\b|object at 0x|msgspec|starlette")


def compared(answer: Response, expected: Expected) -> str | None:
    """Return how a response differs from the expected status, code, param or error keys, or None."""
    wanted = expected.status if isinstance(expected.status, frozenset) else {expected.status}
    if answer.status not in wanted:
        return f"status {answer.status} and not {sorted(wanted)}: {answer.body[:200]!r}"
    if "x-request-id" not in answer.headers:
        return "no x-request-id"
    if answer.status < 400 or not expected.body:
        return None
    if answer.headers.get("content-type") != "application/json":
        return f"content-type {answer.headers.get('content-type')}"
    try:
        failure = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"the body is no error: {answer.body[:200]!r}"
    if set(failure) not in (KEYS, MESSAGES_KEYS) or not failure["message"]:
        return f"the error has wrong keys: {answer.body[:200]!r}"
    if "\n" in failure["message"]:
        return f"the message has several lines: {failure['message'][:200]!r}"
    if LEAKS.search(failure["message"]) or len(failure["message"]) > 600:
        return f"the message leaks internals or is too long: {failure['message'][:200]}"
    if set(failure) == MESSAGES_KEYS:
        return None
    codes = {expected.code} if isinstance(expected.code, str) else expected.code
    if codes is not None and failure["code"] not in codes:
        return f"code {failure['code']} and not {sorted(codes)}: {failure['message']}"
    if expected.param is not None and failure["param"] != expected.param:
        return f"param {failure['param']!r} and not {expected.param!r}: {failure['message']}"
    return None
