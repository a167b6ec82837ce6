"""Request lines with a whole address, as clients with a proxy setting send them."""

from __future__ import annotations

import socket

import pytest

from aiakq.server.http.request_target import split_absolute


def ask(server, request: bytes) -> bytes:
    """Return everything that comes back on a new connection, until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        while piece := connection.recv(1 << 16):
            received += piece
    return received


ABSOLUTE = [
    (b"http://127.0.0.1:8000/v1/models?x=http://a", (b"/v1/models?x=http://a", b"127.0.0.1:8000")),
    (b"HTTPS://Localhost/a", (b"/a", b"Localhost")),
    (b"http://[::1]:80", (b"/", b"[::1]:80")),
    (b"http://a?b=c", (b"/?b=c", b"a")),
    (b"/http://a/b", (b"/http://a/b", None)),
    (b"*", (b"*", None)),
    (b"a:80", (b"a:80", None)),
]


def test_options_of_a_target_without_a_path_is_for_the_whole_server():
    assert split_absolute(b"http://a:80", b"OPTIONS") == (b"*", b"a:80")
    assert split_absolute(b"http://a:80/", b"OPTIONS") == (b"/", b"a:80")


@pytest.mark.parametrize(("target", "expected"), ABSOLUTE)
def test_absolute_targets_are_split_into_path_and_host(target, expected):
    assert split_absolute(target) == expected


@pytest.mark.parametrize(
    "target",
    [b"http:///a", b"http://a@b/c", b"ftp://a/b", b"http://a:b/c", b"http://a\\b/", b"http://a:1:2/", b"http://[a/"],
)
def test_absolute_targets_with_a_host_that_is_none_are_refused(server, target):
    with pytest.raises(ValueError):
        split_absolute(target)
    answer = ask(server, b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % target)
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_http" in answer


def test_the_host_of_an_absolute_target_takes_precedence(server):
    line = b"GET http://%b/version HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n"
    assert ask(server, line % (b"127.0.0.1", b"evil.example")).startswith(b"HTTP/1.1 200")
    assert ask(server, line % (b"evil.example", b"127.0.0.1")).startswith(b"HTTP/1.1 421")
    assert ask(server, line.replace(b"host: %b\r\n", b"") % b"127.0.0.1").startswith(b"HTTP/1.1 400")
