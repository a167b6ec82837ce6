"""Case and Expected, and the requests and inputs that cases consist of."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

#: Arguments of the server: low limits, so that small inputs exceed them, and short timeouts.
BODY_LIMIT = 100_000
TIMES = {"header_timeout": 3.0, "body_timeout": 3.0, "idle_timeout": 60.0, "write_timeout": 5.0}
CONTEXT, VOCABULARY = 1024, 4096

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


@dataclass(frozen=True)
class Expected:
    """An expected response: its status, and the error's code and param. None allows any, a set one of several."""

    status: int | frozenset[int]
    code: str | frozenset[str] | None = None
    param: str | None = None
    body: bool = True


@dataclass(frozen=True)
class Case:
    """An input and its expected responses.

    pieces   bytes to send, and pauses in seconds between them.
    answers  expected responses, in order.
    closed   whether the server closes the connection after them; None allows both.
    leave    how the client ends: "reads" everything, "reads some", or "closes", "resets" or "half-closes" without
             reading.
    slow     whether the case takes seconds.
    """

    kind: str
    pieces: tuple[bytes | float, ...]
    answers: tuple[Expected, ...] = ()
    closed: bool | None = None
    leave: str = "reads"
    slow: bool = False


Draw = random.Random
OK = Expected(200)
#: Any success or client error, but no server error.
ANY = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 431})
INVALID_HTTP = Expected(400, "invalid_http")
TOO_LARGE_HEAD = Expected(431, "headers_too_large")


def head(method: str, path: str, *headers: bytes, host: bytes | None = b"127.0.0.1") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1")]
    if host is not None:
        lines.append(b"host: " + host)
    return b"\r\n".join([*lines, *headers, b"", b""])


def post(path: str, body: bytes, *headers: bytes, host: bytes | None = b"127.0.0.1") -> bytes:
    length = b"content-length: %d" % len(body)
    return head("POST", path, b"content-type: application/json", length, *headers, host=host) + body


def post_json(path: str, fields: Any) -> bytes:
    return post(path, json.dumps(fields).encode())


GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    TOKENIZE: {"prompt": "Once"},
    DETOKENIZE: {"tokens": [5, 6]},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    COUNT_TOKENS: {"messages": [{"role": "user", "content": "Hi"}]},
}
ROUTES = {
    **dict.fromkeys(GOOD, ("POST",)),
    "/v1/models": ("GET",),
    "/v1/models/tinybooks": ("GET",),
    "/health": ("GET",),
    "/ping": ("GET", "POST"),
    "/live": ("GET",),
    "/ready": ("GET",),
    "/load": ("GET",),
    "/version": ("GET",),
    "/metrics": ("GET",),
    "/openapi.json": ("GET", "HEAD"),
    "/docs": ("GET",),
}


def some_text(draw: Draw, most: int = 12) -> str:
    alphabet = "abcXYZ019 _-./\\%&?#'\"<>{}[]()\t\u00e9\u4e2d\U0001f600\u200e\u0301\u0000"
    return "".join(draw.choice(alphabet) for _ in range(draw.randint(1, most)))


def junk(draw: Draw, least: int, most: int) -> bytes:
    return draw.randbytes(draw.randint(least, most))


BOMBS = (
    "{{ 'a' * 10**9 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '%1000000000d' % 1 }}",
    "{% include '/etc/passwd' %}",
)


def cut(draw: Draw, sent: bytes) -> tuple[bytes | float, ...]:
    """Split ``sent`` into pieces in one of five cases."""
    if draw.random() < 0.8 or len(sent) < 2:
        return (sent,)
    at = sorted(draw.randrange(1, len(sent)) for _ in range(draw.randint(1, 3)))
    pieces: list[bytes | float] = []
    for start, end in zip([0, *at], [*at, len(sent)], strict=True):
        pieces += [sent[start:end], 0.002]
    return tuple(pieces[:-1])


def refused(draw: Draw, path: str, change: dict[str, Any], code: Any, param: str | None, kind: str) -> Case:
    """Return a case of a valid request with an invalid ``change``, after which the connection is usable."""
    fields = list((GOOD[path] | change).items())
    draw.shuffle(fields)
    sent = post_json(path, dict(fields))
    return Case(f"{path} {kind:.60}", cut(draw, sent), (Expected(400, code, param),), closed=False)
