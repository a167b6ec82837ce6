"""Requests to wrong methods, paths, hosts and from wrong origins."""

from __future__ import annotations

import json

from hostile_cases.requests import CHAT, COMPLETIONS, GOOD, ROUTES, TOKENIZE, Case, Draw, Expected, cut, head, post_json


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
    allowed = {*ROUTES[path], *(["HEAD"] if "GET" in ROUTES[path] else [])}
    method = draw.choice([one for one in methods if one not in allowed])
    if method == "CONNECT":
        # Later bytes would belong to a tunnel, which the server does not open.
        return Case(f"{method} {path}", (head(method, path),), (Expected(405, "method_not_allowed"),), closed=None)
    expected = Expected(405, "method_not_allowed", body=method != "HEAD")
    return Case(f"{method} {path}", cut(draw, head(method, path)), (expected,), closed=False)


def wrong_paths(draw: Draw) -> Case:
    path = draw.choice(list(ROUTES)[4:] + ["/metrics", "/etc/passwd"])
    some = f"{draw.randrange(10**9)}"
    changed = draw.choice(
        [
            "/" + path,
            path + "//",
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
            "evil.example:443",
        ]
    )
    allowed = frozenset({404, 405}) if changed.upper() in ROUTES else 404
    codes = frozenset({"not_found", "unknown_model"})
    return Case(f"{changed:.40}", cut(draw, head("GET", changed)), (Expected(allowed, codes),), closed=False)


def wrong_hosts(draw: Draw) -> Case:
    name = draw.choice([b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example", b"local", b"a" * 300])
    host = draw.choice([name, name + b":80", name + b".", b"user@" + name, name.upper(), b"[evil]", b"127.0.0.1x"])
    sent = post_json(COMPLETIONS, GOOD[COMPLETIONS]).replace(b"host: 127.0.0.1", b"host: " + host)
    if draw.random() < 0.3:
        sent = head("GET", draw.choice(list(ROUTES)), host=host)
    elif draw.random() < 0.2:  # the host of an absolute target overrides the header
        sent, host = head("GET", f"http://evil.example{draw.choice(list(ROUTES))}"), b"http://evil.example"
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
