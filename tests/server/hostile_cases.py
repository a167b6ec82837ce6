"""Hostile HTTP inputs, each with the answer that is promised for it. ``case(seed, index)`` is always the same one.

A family is one function that draws cases of a kind; FAMILIES says how often each comes up. They are malformed HTTP,
floods of headers, chunks and bytes, JSON that is none or too deep, text that is no text, wrong types and bounds for
every field, unknown fields, tricks with paths, hosts and origins, pipelining, slow senders, clients that leave.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

#: What the server is started with, so that bounds are met by small inputs and waiting is short.
BODY_LIMIT = 100_000
TIMES = {"header_timeout": 3.0, "body_timeout": 3.0, "idle_timeout": 60.0, "write_timeout": 5.0}
CONTEXT, VOCABULARY = 1024, 4096

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


@dataclass(frozen=True)
class Expected:
    """One promised answer: its status, the error's code and param. None: any; a set: one of them."""

    status: int | frozenset[int]
    code: str | frozenset[str] | None = None
    param: str | None = None
    body: bool = True


@dataclass(frozen=True)
class Case:
    """What is sent, and what is promised for it.

    pieces   bytes to send, and pauses in seconds between them.
    answers  promised, in order.
    closed   whether the server ends the connection after them; None: it may.
    leave    how the client goes: "reads" everything; "closes", "resets" or "half-closes" without reading.
    slow     takes seconds by its nature.
    """

    kind: str
    pieces: tuple[bytes | float, ...]
    answers: tuple[Expected, ...] = ()
    closed: bool | None = None
    leave: str = "reads"
    slow: bool = False


Draw = random.Random
OK = Expected(200)
#: Whatever it turns out to be, it is the client's fault or nobody's.
ANY = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 431})
INVALID_HTTP = Expected(400, "invalid_http")
TOO_LARGE_HEAD = Expected(431, "headers_too_large")


def case(seed: int, index: int) -> Case:
    """Case ``index`` of the run ``seed``."""
    draw = random.Random(f"{seed}/{index}")
    family = draw.choices(list(FAMILIES), weights=list(FAMILIES.values()))[0]
    made = family(draw)
    return replace(made, kind=f"{family.__name__}: {made.kind}")


# --- requests ---------------------------------------------------------------------------------------------------------


def head(method: str, path: str, *headers: bytes, host: bytes | None = b"127.0.0.1") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1")]
    if host is not None:
        lines.append(b"host: " + host)
    return b"\r\n".join([*lines, *headers, b"", b""])


def post(path: str, body: bytes, *headers: bytes, host: bytes | None = b"127.0.0.1") -> bytes:
    length = b"content-length: %d" % len(body)
    return head("POST", path, b"content-type: application/json", length, *headers, host=host) + body


def ask(path: str, fields: Any) -> bytes:
    return post(path, json.dumps(fields).encode())


GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    TOKENIZE: {"prompt": "Once"},
    DETOKENIZE: {"tokens": [5, 6]},
}
ROUTES = {
    **dict.fromkeys(GOOD, ("POST",)),
    "/v1/models": ("GET",),
    "/v1/models/tinybooks": ("GET",),
    "/health": ("GET",),
    "/ping": ("GET", "POST"),
    "/ready": ("GET",),
    "/load": ("GET",),
    "/version": ("GET",),
    "/metrics": ("GET",),
    "/openapi.json": ("GET", "HEAD"),
    "/docs": ("GET", "HEAD"),
}


def some_text(draw: Draw, most: int = 12) -> str:
    alphabet = "abcXYZ019 _-./\\%&?#'\"<>{}[]()\t\u00e9\u4e2d\U0001f600\u200e\u0301\u0000"
    return "".join(draw.choice(alphabet) for _ in range(draw.randint(1, most)))


def junk(draw: Draw, least: int, most: int) -> bytes:
    return draw.randbytes(draw.randint(least, most))


# --- HTTP that is none ------------------------------------------------------------------------------------------------


def malformed_http(draw: Draw) -> Case:
    name, value = f"x-{draw.randrange(10**6)}".encode(), str(draw.random()).encode()
    good = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    start = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    length = draw.choice([b"-5", b"+5", b"0x5", b"5 5", b"5,6", b"1e3", b"five", b"", b"5;", b"9" * 400, b"\xb2"])
    coding = draw.choice(
        [b"gzip", b"chunked, gzip", b"xchunked", b"chunked, chunked", b"chunked;q=1", b"", b"\x0bchunked"]
    )
    kinds: dict[str, bytes] = {
        "bare line feed": good + name + b": 1\n" + name + b": 2\r\n\r\n",
        "bare line feeds": b"GET /version HTTP/1.1\nhost: 127.0.0.1\n\n",
        "folded header": good + name + b": " + value + draw.choice([b"\r\n ", b"\r\n\t"]) + b"more\r\n\r\n",
        "blank in a name": good + name + b" : 1\r\n\r\n",
        "no colon": good + name + b"\r\n\r\n",
        "no name": good + b": " + value + b"\r\n\r\n",
        "strange name": good + name + draw.choice([b"(", b"@", b'"', b"{", b"\x7f", b"\xe9", b"\0"]) + b": 1\r\n\r\n",
        "NUL in a value": good + name + b": a\0b\r\n\r\n",
        "carriage return in a value": good + name + b": a\rb: c\r\n\r\n",
        "no host": b"GET /version HTTP/1.1\r\n" + name + b": 1\r\n\r\n",
        "two hosts": good + b"host: " + value + b"\r\n\r\n",
        "length and chunks": start + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunks and length": start + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "two lengths": start + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}",
        "bad length": start + b"content-length: " + length + b"\r\n\r\n{}{}{}",
        "bad coding": start + b"transfer-encoding: " + coding + b"\r\n\r\n0\r\n\r\n",
        "two codings": start + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        "bad version": b"GET /version HTTP/" + draw.choice([b"1", b"1.", b"x.y", b"11", b"1.1.1", b""]) + b"\r\n\r\n",
        "HTTP/0.9": b"GET /version\r\n\r\n",
        "no target": b"GET  HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        "blanks in the target": b"GET /ver sion HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        "control in the target": b"GET /ver" + bytes([draw.randrange(1, 32)]) + b"sion HTTP/1.1\r\nhost: a\r\n\r\n",
        "strange method": draw.choice([b"G@T", b"G(T", b'"GET"', b"G\0T", b"\xc9T"])
        + b" / HTTP/1.1\r\nhost: a\r\n\r\n",
        "another protocol": draw.choice(
            [
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
                b"EHLO there\r\n\r\n",
                b"\x05\x01\x00\r\n\r\n",
                b"*1\r\n$4\r\nPING\r\n\r\n",
            ]
        ),
        "noise": draw.choice([b"\0", b"\xff", b"\x80", b"{"]) + junk(draw, 1, 300).replace(b"\n", b"") + b"\r\n\r\n",
    }
    kind = draw.choice(list(kinds))
    return Case(kind, cut(draw, kinds[kind]), (INVALID_HTTP,), closed=True)


def bad_chunks(draw: Draw) -> Case:
    start = head("POST", draw.choice(list(GOOD)), b"content-type: application/json", b"transfer-encoding: chunked")
    flood = draw.randint(2049, 4000)
    kinds = {
        "no number": start + draw.choice([b"xyz", b"-1", b"+1", b"0x5", b" 5", b"", b"5 5"]) + b"\r\nabc\r\n0\r\n\r\n",
        "a size of many digits": start + b"f" * draw.randint(21, 60) + b"\r\nabc\r\n",
        "no end of a chunk": start + b"3\r\nabcd\r\n0\r\n\r\n",
        "bare line feed after a size": start + b"3\nabc\r\n0\r\n\r\n",
        "bare line feed after a chunk": start + b"3\r\nabc\n0\r\n\r\n",
        "a flood": start + b"1\r\n \r\n" * flood,
    }
    kind = draw.choice(list(kinds))
    return Case(kind, cut(draw, kinds[kind]), (INVALID_HTTP,), closed=True)


def header_floods(draw: Draw) -> Case:
    some = draw.randint(1, 60_000)
    kinds = {
        "long value": head("GET", "/version", b"x-long: " + b"a" * (65_500 + some)),
        "long name": head("GET", "/version", b"x" * (65_500 + some) + b": 1"),
        "long target": head("GET", "/" + "a" * (65_500 + some)),
        "many": head("GET", "/version", *(b"x-%d: 1" % i for i in range(draw.randint(100, 2000)))),
        "many of one name": head("GET", "/version", *[b"cookie: a=b"] * draw.randint(100, 2000)),
        "many long ones": head("GET", "/version", *(b"x-%d: " % i + b"a" * 1000 for i in range(draw.randint(66, 99)))),
        "without an end": b"GET /version HTTP/1.1\r\nx-long: " + b"a" * (140_000 + some),
    }
    kind = draw.choice(list(kinds))
    return Case(kind, cut(draw, kinds[kind]), (TOO_LARGE_HEAD,), closed=True)


def odd_headers(draw: Draw) -> Case:
    """Headers that are good HTTP and must have no effect, or their one effect."""
    path, good = COMPLETIONS, json.dumps(GOOD[COMPLETIONS]).encode()
    plain = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n" % len(good)
    media = draw.choice(
        [b"text/plain", b"multipart/form-data; boundary=x", b"application/xml", b"*/*", b"json", b"\xff/\xff"]
    )
    coding = draw.choice([b"gzip", b"br", b"deflate", b"zstd", b"gzip, gzip", b"identity, gzip", b"x"])
    ignored = draw.choice(
        [
            b"x-request-id: " + draw.choice([b"cmpl-1", b"a" * 9000, b"\x1b[31mred", b"../../x", b"{{7*7}}"]),
            b"authorization: " + draw.choice([b"Bearer x", b"Basic !!!", b"\xff\xfe", b"Bearer " + b"a" * 5000]),
            b"x-forwarded-for: " + draw.choice([b"127.0.0.1", b"::1", b"unix:", b"a" * 200]),
            b"x-forwarded-host: evil.example",
            b"x-original-url: /metrics",
            b"x-http-method-override: DELETE",
            b"forwarded: for=127.0.0.1;host=evil.example;proto=https",
            b"cookie: " + b"a=b; " * draw.randint(1, 500),
            b"range: bytes=0-" + str(draw.randrange(10**9)).encode(),
            b"accept: " + draw.choice([b"text/html", b"\xff", b"application/xml;q=0.1", b"*/*;q=nan"]),
            b"accept-encoding: gzip, br, zstd;q=1",
            b"upgrade: " + draw.choice([b"websocket", b"h2c", b"TLS/1.0"]) + b"\r\nconnection: upgrade",
            b"expect: " + draw.choice([b"200-ok", b"nothing"]),
            b"te: trailers",
            b"connection: keep-alive, " + draw.choice([b"content-length", b"host", b"x"]),
            b"content-type: application/json; charset=" + draw.choice([b"utf-8", b"utf-7", b"utf-16", b"x" * 100]),
        ]
    )
    typed = plain if b"content-type" in ignored else plain + b"content-type: application/json\r\n"
    kinds = {
        "another media type": (plain + b"content-type: " + media, (Expected(415, "unsupported_media_type"),)),
        "another coding": (typed + b"content-encoding: " + coding, (Expected(415, "unsupported_encoding"),)),
        "ignored": (typed + ignored, (OK,)),
    }
    kind = draw.choices(list(kinds), weights=[1, 1, 4])[0]
    sent, answers = kinds[kind]
    return Case(f"{kind} {path}", (sent + b"\r\n\r\n" + good,), answers, closed=False)


def bodies_too_large(draw: Draw) -> Case:
    path, more = draw.choice(list(GOOD)), draw.randint(1, 50_000)
    start = head("POST", path, b"content-type: application/json", b"transfer-encoding: chunked")
    size = draw.randint(500, 30_000)
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    announced = draw.choice([BODY_LIMIT + 1, BODY_LIMIT + more, 2**31, 2**63, 10**19])
    length = b"content-length: %d" % announced
    kinds = {
        "announced": head("POST", path, b"content-type: application/json", length) + b"{" * draw.randint(0, 100),
        "sent": post(path, b'{"prompt": "' + b"a" * (BODY_LIMIT + more) + b'"}'),
        "in chunks": start + chunk * (BODY_LIMIT // size + 2) + b"0\r\n\r\n",
    }
    kind = draw.choice(list(kinds))
    return Case(f"{kind} {path}", cut(draw, kinds[kind]), (Expected(413, "request_too_large"),))


# --- bodies -----------------------------------------------------------------------------------------------------------


def bad_json(draw: Draw) -> Case:
    path = draw.choice(list(GOOD))
    good = json.dumps(GOOD[path]).encode()
    first = next(iter(GOOD[path]))
    deep, digits = draw.randint(65, 16_000), draw.randint(4301, 20_000)
    name = some_text(draw).replace('"', "").replace("\\", "")
    twice = json.dumps(name, ensure_ascii=False).encode()
    invalid = Expected(400, "invalid_json")
    kinds: dict[str, tuple[bytes, Expected]] = {
        "cut": (good[: draw.randint(0, len(good) - 1)], invalid),
        "more behind it": (good + draw.choice([b"x", b"{}", b",", b"]", b"\0", good]), invalid),
        "single quotes": (good.replace(b'"', b"'"), invalid),
        "comma at the end": (good[:-1] + b",}", invalid),
        "comment": (good[:-1] + b"/* */}", invalid),
        "byte order mark": (b"\xef\xbb\xbf" + good, invalid),
        "other coding": (json.dumps(GOOD[path]).encode(draw.choice(["utf-16", "utf-32", "utf-16-le"])), invalid),
        "no object": (
            draw.choice([b"[]", b"null", b"1", b'"text"', b"true", b"[{}]", b"0.5", good.join((b"[", b"]"))]),
            invalid,
        ),
        "nothing": (draw.choice([b"", b" ", b"\r\n"]), invalid),
        "deep list": (b'{"%b": ' % first.encode() + b"[" * deep, invalid),
        "deep closed list": (b'{"%b": ' % first.encode() + b"[" * deep + b"]" * deep + b"}", invalid),
        "deep object": (b'{"a":' * deep + b"1" + b"}" * deep, invalid),
        "brackets": (b"[" * deep, invalid),
        "key twice": (good[:-1] + b", " + twice + b": 1, " + twice + b": 2}", Expected(400, "duplicate_key")),
        "first field twice": (b'{"%b": 1, ' % first.encode() + good[1:], Expected(400, "duplicate_key", first)),
        "many keys": (good[:-1] + b"".join(b',"%x":1' % i for i in range(10_001)) + b"}", invalid),
        "not UTF-8": (
            good[:-1]
            + b', "user": "'
            + draw.choice([b"\xff", b"\xc3", b"\xe4\xb8", b"\xed\xa0\x80", b"\xc0\xaf"])
            + b'"}',
            invalid,
        ),
        "lone surrogate": (good[:-1] + b', "user": "\\u%s"}' % draw.choice([b"d800", b"dfff", b"dc00"]), invalid),
        "bad escape": (good[:-1] + b', "user": "' + draw.choice([b"\\x41", b"\\u12", b"\\", b"\\a"]) + b'"}', invalid),
        "control in a string": (good[:-1] + b', "user": "' + bytes([draw.randrange(0, 32)]) + b'"}', invalid),
        "a number of many digits": (good[:-1] + b', "seed": ' + b"1" * digits + b"}", Expected(400)),
        "bad number": (
            good[:-1] + b', "seed": ' + draw.choice([b"01", b"1.", b".5", b"+1", b"0x1", b"1e", b"--1"]) + b"}",
            invalid,
        ),
        "unquoted": (b"{prompt: 1}", invalid),
        "noise": (junk(draw, 1, 2000), invalid),
    }
    kind = draw.choice(list(kinds))
    body, expected = kinds[kind]
    if path == DETOKENIZE and kind == "a number of many digits":
        expected = Expected(400)
    return Case(f"{kind} {path}", cut(draw, post(path, body)), (expected,), closed=False)


#: Values of every type that JSON has; a field gets those it does not take.
VALUES: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (0, 1, -1, 7),
    "float": (0.5, 1.0, -2.5, 1e300),
    "str": ("1", "", "true", "x", "null"),
    "list": ([], [1], ["a"], [[]], [None]),
    "dict": ({}, {"a": 1}),
}
TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "n",
            "best_of",
            "top_k",
            "seed",
            "min_tokens",
            "max_tokens",
            "truncate_prompt_tokens",
            "priority",
            "prompt_logprobs",
        ),
        ("int",),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        ("int", "float"),
    ),
    **dict.fromkeys(
        (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "return_tokens_as_token_ids",
            "return_token_ids",
            "stream",
        ),
        ("bool",),
    ),
    "model": ("str",),
    "cache_salt": ("str",),
    "stop": ("str", "list"),
    "stop_token_ids": ("list",),
    "allowed_token_ids": ("list",),
    "bad_words": ("list",),
    "logit_bias": ("dict",),
    "stream_options": ("dict",),
}
OWN: dict[str, dict[str, tuple[str, ...]]] = {
    COMPLETIONS: {**TAKES, "prompt": ("str", "list"), "logprobs": ("int",), "echo": ("bool",)},
    CHAT: {
        **TAKES,
        "messages": ("list",),
        "max_completion_tokens": ("int",),
        "logprobs": ("bool",),
        "top_logprobs": ("int",),
        "add_generation_prompt": ("bool",),
        "continue_final_message": ("bool",),
        "chat_template_kwargs": ("dict",),
    },
    TOKENIZE: {"model": ("str",), "prompt": ("str",), "add_special_tokens": ("bool",), "return_token_strs": ("bool",)},
    DETOKENIZE: {"model": ("str",), "tokens": ("list",)},
}


def wrong_types(draw: Draw) -> Case:
    path = draw.choice(list(OWN))
    field = draw.choice(list(OWN[path]))
    others = [kind for kind in VALUES if kind not in OWN[path][field]]
    value = draw.choice(VALUES[draw.choice(others)])
    return refused(draw, path, {field: value}, "invalid_type", field, f"{field}={value!r}")


def refused(draw: Draw, path: str, change: dict[str, Any], code: Any, param: str | None, kind: str) -> Case:
    """A request that is good but for ``change``; the connection is good for another one."""
    fields = list((GOOD[path] | change).items())
    draw.shuffle(fields)
    sent = ask(path, dict(fields))
    return Case(f"{path} {kind:.60}", cut(draw, sent), (Expected(400, code, param),), closed=False)


FLOAT_BOUNDS = {
    "temperature": (-0.1, 1e5),
    "top_p": (0, 1.01),
    "min_p": (-0.01, 1.5),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-3, 2.0001),
    "repetition_penalty": (0, 1e5),
}
INT_BOUNDS = {
    "n": (0, 17),
    "best_of": (0, 17),
    "top_k": (-2, 2**31 + 1),
    "seed": (-(2**63) - 1, 2**63),
    "min_tokens": (-1, 2**31 + 1),
    "max_tokens": (-1, 2**31 + 1),
    "truncate_prompt_tokens": (-2, 2**31 + 1),
    "priority": (-(2**31) - 1, 2**31),
    "prompt_logprobs": (-2, 21),
}


def out_of_range(draw: Draw) -> Case:
    path = draw.choice((COMPLETIONS, CHAT))
    out = "value_out_of_range"
    if draw.random() < 0.5:
        field, (low, high) = draw.choice(list(FLOAT_BOUNDS.items()))
        value = draw.choice([low, low - draw.random() * 1e6, high, high + draw.random() * 1e6, -1e308])
        text = draw.choice([str(value), "NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
        body = json.dumps(GOOD[path]).encode()[:-1] + b', "%b": %b}' % (field.encode(), text.encode())
        return Case(f"{path} {field}={text:.20}", (post(path, body),), (Expected(400, out, field),), closed=False)
    field, (low, high) = draw.choice(list(INT_BOUNDS.items()))
    value = draw.choice(
        [low, low - draw.randrange(10**6), high, high + draw.randrange(10**6), 10 ** draw.randint(19, 400)]
    )
    change: dict[str, Any] = {field: value, **({"stream": False} if field == "prompt_logprobs" else {})}
    return refused(draw, path, change, out, field, f"{field}={value}")


def hostile_values(draw: Draw) -> Case:
    """Values of the right type that ask for what cannot be had."""
    ids = draw.choice([VOCABULARY, -1, 2**31, 2**40, 2**70, -(2**63)])
    out, token = "value_out_of_range", "invalid_token_id"
    long = "a" * 257
    both: list[tuple[dict[str, Any], str, str]] = [
        ({"stop": [some_text(draw)] * 17}, out, "stop"),
        ({"stop": draw.choice(["", long, ["a", ""], ["a", long]])}, out, "stop"),
        ({"stop": draw.choice([["a", None], [1], [["a"]], [{}]])}, "invalid_type", "stop"),
        ({"stop_token_ids": [5, ids]}, token, "stop_token_ids"),
        ({"allowed_token_ids": [5, ids]}, token, "allowed_token_ids"),
        ({"allowed_token_ids": []}, out, "allowed_token_ids"),
        ({"logit_bias": {str(ids): 1}}, token, "logit_bias"),
        ({"logit_bias": {draw.choice(["a", "", "1.5", "5 5", "0x5", "\u0000"]): 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, out, "logit_bias"),
        ({"bad_words": ["a"] * 129}, out, "bad_words"),
        ({"bad_words": [draw.choice(["", " ", "\t\n", long])]}, out, "bad_words"),
        ({"min_tokens": 2, "max_tokens": 1}, out, "min_tokens"),
        ({"cache_salt": ""}, out, "cache_salt"),
        ({"n": 3, "best_of": 2}, out, "best_of"),
        ({"best_of": 2, "stream": True}, "unsupported_parameter", "best_of"),
        ({"priority": draw.randint(1, 9)}, "unsupported_parameter", "priority"),
        ({"stream_options": {"include_usage": True}}, "unsupported_parameter", "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"stream": True, "stream_options": {"usage": 1}}, "unknown_field", "stream_options.usage"),
        ({"model": model_name(draw)}, "unknown_model", "model"),
    ]
    completion = [
        ({"prompt": draw.choice(["", [], [[]], ["a", ""]])}, "empty_prompt", "prompt"),
        (
            {"prompt": draw.choice([["a", 1], [1, "a"], [True], [[1.5]], [None], [[None]], [{}]])},
            "invalid_type",
            "prompt",
        ),
        ({"prompt": [5, ids]}, token, "prompt"),
        ({"prompt": [[5], [ids]]}, token, "prompt"),
        ({"prompt": ["a"] * draw.randint(33, 9000)}, "too_many_prompts", "prompt"),
        ({"prompt": ["a"] * draw.randint(5, 32), "n": 16}, "too_many_prompts", "n"),
        ({"prompt": [5] * draw.randint(CONTEXT, 30_000)}, "context_length_exceeded", "prompt"),
        ({"prompt": "word " * draw.randint(1500, 19_000)}, "context_length_exceeded", "prompt"),
        ({"max_tokens": draw.randint(CONTEXT, 2**31)}, "context_length_exceeded", "max_tokens"),
        ({"logprobs": draw.choice([21, 4096, -2])}, out, "logprobs"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1}, "nothing_left", None),
    ]
    message = {"role": "user", "content": "Hi"}
    chat = [
        ({"messages": []}, out, "messages"),
        ({"messages": [message, {"content": "Hi"}]}, "missing_field", "messages[1].role"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, "invalid_type", "messages[0].role"),
        ({"messages": [draw.choice([5, "a", None, []])]}, "invalid_type", "messages[0]"),
        (
            {"messages": [{"role": "user", "content": draw.choice([5, True, 0.5, {}])}]},
            "invalid_type",
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "invalid_type", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [part(draw)]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        ({"messages": [message | {"tool_calls": [{}]}]}, "unsupported_parameter", "messages[0].tool_calls"),
        ({"messages": [message | {"colour": 1}]}, "unknown_field", "messages[0].colour"),
        ({"messages": [message] * draw.randint(500, 1500)}, "context_length_exceeded", "messages"),
        ({"chat_template": draw.choice(BOMBS)}, "unsupported_parameter", "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "unsupported_parameter", "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"a": draw.choice([[], {}, [1]])}}, "invalid_type", "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a b": 1}}, "unsupported_parameter", "chat_template_kwargs.a b"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": draw.choice([21, -2, 10**9])}, out, "top_logprobs"),
        ({"max_completion_tokens": draw.randint(CONTEXT, 2**31)}, "context_length_exceeded", "max_completion_tokens"),
    ]
    path = draw.choice((COMPLETIONS, CHAT))
    change, code, param = draw.choice(both + (completion if path == COMPLETIONS else chat))
    case = refused(draw, path, change, code, param, f"{code} {param}")
    return replace(case, answers=(Expected(404, code, param),)) if code == "unknown_model" else case


BOMBS = (
    "{{ 'a' * 10**9 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '%1000000000d' % 1 }}",
    "{% include '/etc/passwd' %}",
)


def part(draw: Draw) -> dict[str, Any]:
    url = draw.choice(
        ["file:///etc/passwd", "http://127.0.0.1:1/x", "http://169.254.169.254/", "data:image/png;base64,AA"]
    )
    kinds = ("image_url", "input_audio", "video_url", "file", "refusal", "image", "", None)
    return {"type": draw.choice(kinds), "image_url": {"url": url}}


def model_name(draw: Draw) -> str:
    return draw.choice(
        [
            "../../etc/passwd",
            "/etc/passwd",
            "tinybooks\u0000",
            "tinybooks/..",
            "TINYBOOKS",
            " tinybooks",
            "tinybooks:lora/../..",
            "file:///etc/passwd",
            "a" * draw.randint(100, 20_000),
            "",
            some_text(draw) + "x",
            "{{7*7}}",
        ]
    )


SPELLED = (
    "temprature",
    "max_token",
    "Prompt",
    "PROMPT",
    "prompt ",
    "__class__",
    "__proto__",
    "constructor",
    "model_config",
)
WITHHELD: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "functions": [{}],
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_regex": "(a+)+$",
    "guided_grammar": "(" * 500,
    "structured_outputs": {"regex": "(a|a)*b"},
    "suffix": "end",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["os.system"],
    "prompt_embeds": "AAAA",
    "documents": [{"text": "a"}],
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "web_search_options": {},
    "reasoning_effort": "high",
}


def unknown_fields(draw: Draw) -> Case:
    path = draw.choice(list(GOOD))
    if draw.random() < 0.4:
        name = draw.choice(list(WITHHELD))
        return refused(draw, path, {name: WITHHELD[name]}, "unsupported_parameter", name, name)
    name = draw.choice([draw.choice(SPELLED), some_text(draw, 30) + "!", "x" * draw.randint(65, 5000)])
    value = draw.choice([1, None, "a", [], {"a": {}}])
    return refused(draw, path, {name: value}, "unknown_field", name[:64], f"unknown {name!r:.20}")


def strange_text(draw: Draw) -> Case:
    """Text that is text, and answered; so is what only looks dangerous."""
    text = draw.choice(
        [
            "\u0301" * draw.randint(1, 400),
            "\u0000" * draw.randint(1, 100),
            "\U0001f468\u200d\U0001f469\u200d\U0001f467" * draw.randint(1, 20),
            "\u202eabc\u202c" * draw.randint(1, 20),
            "\ufeff\ufffe\uffff",
            "<|endoftext|>" * draw.randint(1, 50),
            "<|im_start|>system\n<|im_end|>",
            "\r\n\r\ndata: [DONE]\r\n\r\n",
            "a" * draw.randint(1, 800),
            " " * draw.randint(1, 800),
            draw.choice(BOMBS),
            "'; DROP TABLE users; --",
            "$(reboot) `id` ${jndi:ldap://127.0.0.1/a}",
            some_text(draw, 100),
        ]
    )
    path = draw.choice((COMPLETIONS, CHAT, TOKENIZE))
    change: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        role = draw.choice(["user", "system", some_text(draw)])
        change = {"messages": [{"role": role, "content": text}]}
    elif path == COMPLETIONS:
        change |= draw.choice(
            [
                {},
                {"stop": text[:16]},
                {"bad_words": ["x" + text[:16]]},
                {"echo": True},
                {"stream": True},
                {"logprobs": draw.randint(0, 20), "echo": True},
                {"temperature": draw.choice([1e-40, 1e4, 5e-324]), "seed": draw.randrange(-(2**63), 2**63)},
                {"top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1},
                {"logit_bias": {"5": 1e300, "6": -1e300}},
                {"repetition_penalty": 1e-300, "presence_penalty": 2, "frequency_penalty": -2},
                {"truncate_prompt_tokens": draw.choice([-1, 1, 2**31])},
                {"user": text, "metadata": {"a": [text]}},
            ]
        )
    answers = (Expected(frozenset({200, 400}), frozenset({"context_length_exceeded"})),)
    fields = GOOD[path] | change
    sent = post(path, json.dumps(fields, ensure_ascii=draw.random() < 0.5).encode())
    return Case(f"{path} {sorted(change)}", cut(draw, sent), answers, closed=None if "stream" in change else False)


# --- routes, hosts, origins -------------------------------------------------------------------------------------------


def wrong_methods(draw: Draw) -> Case:
    path = draw.choice(list(ROUTES))
    methods = [
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "BREW",
        "get",
        "M-SEARCH",
        "CONNECT",
    ]
    method = draw.choice([one for one in methods if one not in ROUTES[path]])
    if method == "CONNECT":
        # What follows belongs to a tunnel, which there is not.
        return Case(f"{method} {path}", (head(method, path),), (Expected(405, "method_not_allowed"),), closed=None)
    expected = Expected(405, "method_not_allowed", body=method != "HEAD")
    return Case(f"{method} {path}", cut(draw, head(method, path)), (expected,), closed=False)


def wrong_paths(draw: Draw) -> Case:
    path = draw.choice(list(ROUTES)[4:] + ["/metrics", "/etc/passwd"])
    some = f"{draw.randrange(10**9)}"
    changed = draw.choice(
        [
            "/" + path,
            path + "/",
            path + "/" + some,
            path.upper(),
            "/" + some,
            "/v1/../" + path.lstrip("/"),
            "/.." * draw.randint(1, 9) + path,
            "/%2e%2e" * draw.randint(1, 9) + path,
            path + "%00",
            path + "%0d%0aset-cookie:a=b",
            path + "\\",
            "/\\evil.example" + path,
            path + ";a=b",
            path + "%252f",
            "/static/..%2f..%2fetc%2fpasswd",
            "/v1/models/" + some,
            "/v1/models/..%2f..%2f" + some,
            "/" + "a/" * draw.randint(10, 5000),
            "/%ff%fe" + some,
            "*",
            "?" + some,
            "http://evil.example" + path,
            "evil.example:443",
        ]
    )
    allowed = frozenset({404, 405}) if changed.upper() in ROUTES else 404
    codes = frozenset({"not_found", "unknown_model"})
    return Case(f"{changed:.40}", cut(draw, head("GET", changed)), (Expected(allowed, codes),), closed=False)


def wrong_hosts(draw: Draw) -> Case:
    name = draw.choice([b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example", b"local", b"a" * 300])
    host = draw.choice([name, name + b":80", name + b".", b"user@" + name, name.upper(), b"[evil]", b"127.0.0.1x"])
    sent = ask(COMPLETIONS, GOOD[COMPLETIONS]).replace(b"host: 127.0.0.1", b"host: " + host)
    if draw.random() < 0.3:
        sent = head("GET", draw.choice(list(ROUTES)), host=host)
    return Case(f"{host!r:.40}", cut(draw, sent), (Expected(421, "host_not_allowed"),), closed=None)


def wrong_origins(draw: Draw) -> Case:
    origin = draw.choice(
        [
            b"http://evil.example",
            b"https://127.0.0.1.evil.example",
            b"http://127.0.0.1:1",
            b"null",
            b"",
            b"file://",
            b"*",
            b"http://127.0.0.1@evil.example",
            b"chrome-extension://abc",
            b"\xff\xfe",
        ]
    )
    path = draw.choice((COMPLETIONS, CHAT, TOKENIZE))
    body = json.dumps(GOOD[path]).encode()
    kind = draw.choice([b"application/json", b"text/plain"])
    length = b"content-length: %d" % len(body)
    sent = head("POST", path, b"content-type: " + kind, length, b"origin: " + origin) + body
    return Case(f"{origin!r}", cut(draw, sent), (Expected(403, "origin_not_allowed"),), closed=None)


# --- connections ------------------------------------------------------------------------------------------------------


def pipelined(draw: Draw) -> Case:
    """Several requests at once; the first that is no HTTP ends it."""
    version = head("GET", "/version")
    choices = [
        (version, OK),
        (head("GET", "/nowhere"), Expected(404, "not_found")),
        (ask(COMPLETIONS, GOOD[COMPLETIONS]), OK),
        (ask(COMPLETIONS, {"prompt": 5}), Expected(400, "invalid_type", "prompt")),
        (post(TOKENIZE, b"{"), Expected(400, "invalid_json")),
        (head("GET", "/version", b"content-length: 3") + b"abc", OK),
    ]
    chosen = [draw.choice(choices) for _ in range(draw.randint(2, 12))]
    # An answer that comes before a body nobody asked for has arrived ends the connection.
    parted = (lambda draw, sent: (sent,)) if choices[-1] in chosen else cut
    sent, answers = b"".join(one for one, _ in chosen), tuple(one for _, one in chosen)
    if draw.random() < 0.5:
        bad = draw.choice([b"GET / HTTP/1.1\nhost: a\n\n", b"\0\r\n\r\n", head("GET", "/", host=None), b"G T\r\n\r\n"])
        return Case("with an end", parted(draw, sent + bad), (*answers, INVALID_HTTP), closed=True)
    if draw.random() < 0.3:
        last = head("GET", "/version", b"connection: close") + version * 3
        # At once: what arrives after the end may cost the client the answers it has not read.
        return Case("closed", (sent + last,), (*answers, OK), closed=True)
    return Case("good ones", parted(draw, sent), answers, closed=False)


def smuggled(draw: Draw) -> Case:
    """A request inside a request: its bytes are a body, or the end of the connection, never an answer of its own."""
    inner = head("GET", "/v1/models")
    fields = GOOD[TOKENIZE] | {"prompt": inner.decode()}
    body = json.dumps(fields).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    start = head("POST", TOKENIZE, b"content-type: application/json", b"transfer-encoding: chunked")
    noise = b'{"prompt": "a"}' + b" " * 5
    kinds = {
        "in a body": Case("", (post(TOKENIZE, body),), (OK,), closed=False),
        "in a chunk": Case("", (start + chunks,), (OK,), closed=False),
        "in an extension": Case(
            "", (start + b"%x;a=%b\r\n%b\r\n0\r\n\r\n" % (len(noise), b"GET", noise),), (OK,), closed=False
        ),
        "in a trailer": Case(
            "", (start + b"%x\r\n%b\r\n0\r\nx: GET /v1/models\r\n\r\n" % (len(noise), noise),), (OK,), closed=False
        ),
        "behind a length": Case(
            "",
            (
                head("POST", TOKENIZE, b"content-length: 4", b"transfer-encoding: chunked")
                + b"5c\r\n"
                + inner
                + b"0\r\n\r\n",
            ),
            (INVALID_HTTP,),
            closed=True,
        ),
        "with a coding in disguise": Case(
            "",
            (
                head(
                    "POST",
                    TOKENIZE,
                    draw.choice(
                        [
                            b"transfer-encoding : chunked",
                            b"transfer-encoding: xchunked",
                            b"transfer-encoding: chunked\r\ntransfer-encoding: cow",
                            b"transfer-encoding:\x0bchunked",
                            b" transfer-encoding: chunked",
                        ]
                    ),
                )
                + b"0\r\n\r\n"
                + inner,
            ),
            (INVALID_HTTP,),
            closed=True,
        ),
    }
    kind = draw.choice(list(kinds))
    return replace(kinds[kind], kind=kind, pieces=cut(draw, b"".join(kinds[kind].pieces)))  # type: ignore[arg-type]


def leaving(draw: Draw) -> Case:
    """A client that goes away in the middle of something."""
    path = draw.choice((COMPLETIONS, CHAT))
    long = GOOD[path] | {
        "max_tokens": draw.choice([1, 40, 800]),
        "stream": draw.random() < 0.5,
        "n": draw.choice([1, 4]),
    }
    sent = ask(path, long)
    how = draw.choice(["closes", "resets", "half-closes"])
    kind = draw.choice(["in the request", "after it", "soon after it", "in the answer"])
    if kind == "in the request":
        return Case(f"{how} {kind}", (sent[: draw.randrange(len(sent))],), leave=how)
    pause = {"after it": 0.0, "soon after it": draw.random() * 0.05, "in the answer": 0.05 + draw.random() * 0.3}[kind]
    return Case(f"{how} {kind}", (sent, pause), leave=how)


def slow_senders(draw: Draw) -> Case:
    """Half of something and then nothing, or a byte now and then."""
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    whole = post(COMPLETIONS, body)
    late = Expected(408, "read_timeout")
    end_of_head = whole.index(b"\r\n\r\n") + 4
    kinds = ["half a head", "half a body", "half a chunk", "huge chunk", "trickling head", "trickling body", "nothing"]
    kind = draw.choice(kinds)
    if kind == "nothing":
        return Case(kind, (), (), closed=True, slow=True)
    if kind.startswith("trickling"):
        sent = whole if kind.endswith("head") else whole[end_of_head:]
        first = b"" if kind.endswith("head") else whole[:end_of_head]
        trickle = [piece for byte in sent for piece in (bytes([byte]), 0.4)]
        return Case(kind, (first, *trickle[:24], 3.0), (late,), closed=True, slow=True)
    if kind.endswith("chunk"):
        size = b"f" * draw.randint(5, 20)
        start = head("POST", COMPLETIONS, b"content-type: application/json", b"transfer-encoding: chunked")
        rest = draw.choice([b"", b"5\r\n", b"5\r\nab"]) if kind == "half a chunk" else size + b"\r\nabc\r\n"
        return Case(kind, (start + rest,), (late,), closed=True, slow=True)
    at = draw.randrange(1, end_of_head - 1) if kind == "half a head" else draw.randrange(end_of_head, len(whole) - 1)
    return Case(kind, (whole[:at],), (late,), closed=True, slow=True)


def mutated(draw: Draw) -> Case:
    """A good request with bytes changed, left out, doubled or added: no promise but that it is the client's fault."""
    path = draw.choice(list(GOOD))
    sent = bytearray(ask(path, GOOD[path]))
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(sent))
        end = min(len(sent), at + draw.randint(1, 8))
        change = draw.randrange(5)
        if change == 0:
            sent[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            sent[at:at] = junk(draw, 1, 8)
        elif change == 2 and len(sent) > 20:
            del sent[at:end]
        elif change == 3:
            sent[at:at] = sent[at:end] * draw.randint(1, 50)
        else:
            sent[at:end] = draw.choice(
                [b"\r\n", b"\n", b"\0", b"\xff" * 4, b"%00", b"9" * 30, b'"', b"{", b"[" * 99, b":"]
            )
    return Case(path, (bytes(sent),), (Expected(ANY),), leave="reads what comes")


def cut(draw: Draw, sent: bytes) -> tuple[bytes | float, ...]:
    """Some requests arrive in several packets."""
    if draw.random() < 0.8 or len(sent) < 2:
        return (sent,)
    at = sorted(draw.randrange(1, len(sent)) for _ in range(draw.randint(1, 3)))
    pieces: list[bytes | float] = []
    for start, end in zip([0, *at], [*at, len(sent)], strict=True):
        pieces += [sent[start:end], 0.002]
    return tuple(pieces[:-1])


FAMILIES: dict[Callable[[Draw], Case], float] = {
    malformed_http: 14,
    bad_chunks: 4,
    header_floods: 3,
    odd_headers: 5,
    bodies_too_large: 2,
    bad_json: 14,
    wrong_types: 10,
    out_of_range: 8,
    hostile_values: 10,
    unknown_fields: 5,
    strange_text: 4,
    wrong_methods: 4,
    wrong_paths: 4,
    wrong_hosts: 3,
    wrong_origins: 2,
    pipelined: 2,
    smuggled: 3,
    leaving: 4,
    slow_senders: 0.5,
    mutated: 8,
}
