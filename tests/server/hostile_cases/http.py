"""Malformed and unusual HTTP: broken syntax, floods of headers and chunks, odd headers, bodies that are too large."""

from __future__ import annotations

import json

from hostile_cases.requests import (
    BODY_LIMIT,
    COMPLETIONS,
    GOOD,
    INVALID_HTTP,
    OK,
    TOO_LARGE_HEAD,
    Case,
    Draw,
    Expected,
    cut,
    head,
    junk,
    post,
)


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
    """Valid headers that must have no effect but their documented one."""
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
