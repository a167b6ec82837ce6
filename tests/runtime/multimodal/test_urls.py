"""URLs of images: what they may reach, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal import urls
from aiakq.runtime.multimodal.urls import MediaUrls, is_public


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a00:1"),
        *("2002:a00:1::", "64:ff9b:1::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "127.1", "0", "localhost", "[::1]", "[::ffff:7f00:1]", "a:b@127.0.0.1"]
)
def test_private_hosts_are_refused_in_every_spelling(host):
    with pytest.raises(AiakqError, match="has an address that is not public"):
        MediaUrls().read(f"http://{host}/image.png", "image")


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("1.1.1.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **given: found)
    with pytest.raises(AiakqError, match="has an address that is not public"):
        MediaUrls().read("http://images.example/image.png", "image")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://xn--/", "http://\0/", "http://a b/", "https:///x"])
def test_malformed_urls_are_refused(url):
    with pytest.raises(AiakqError, match="cannot be fetched|host is not found"):
        MediaUrls().read(url, "image")


@pytest.mark.parametrize("rest", ["/%00", "/" + "a" * 5000, "//[/x", "/..", "/link", "/pipe"])
def test_malformed_and_escaping_file_urls_are_refused(rest, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/hostname")
    with contextlib.suppress(OSError):
        os.mkfifo(folder / "pipe")
    url = "file://[/x" if rest == "//[/x" else f"file://{folder}{rest}"
    with pytest.raises(AiakqError, match="cannot be read: (the file|there is no such file)"):
        MediaUrls(str(folder)).read(url, "image")


@pytest.fixture
def dripping() -> Iterator[str]:
    """A host that sends an endless header, one byte at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not stopped.wait(0.02):
                    connection.sendall(b"x")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    stopped.set()
    listener.close()
    thread.join()


def test_a_host_that_sends_byte_by_byte_does_not_hold_a_thread(dripping, monkeypatch):
    monkeypatch.setattr(urls, "MAX_SECONDS", 0.3)
    with pytest.raises(AiakqError, match=r"it takes longer than 0\.3 s"):
        MediaUrls(domains=["127.0.0.1"]).read(dripping, "image")


def test_images_are_fetched_beside_a_running_event_loop(dripping, monkeypatch):
    monkeypatch.setattr(urls, "MAX_SECONDS", 0.1)

    async def read() -> None:  # as in a notebook
        MediaUrls(domains=["127.0.0.1"]).read(dripping, "image")

    with pytest.raises(AiakqError, match="it takes longer"):
        asyncio.run(read())


def test_name_servers_that_do_not_answer_hold_no_request(monkeypatch):
    """Nor the end of the process: the thread that waits for them is not joined."""
    asked, answered = threading.Event(), threading.Event()

    def getaddrinfo(*arguments: object, **given: object) -> list[object]:
        asked.set()
        answered.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(urls, "MAX_SECONDS", 0.2)
    try:
        with pytest.raises(AiakqError, match=r"it takes longer than 0\.2 s"):
            MediaUrls().read("http://images.example/image.png", "image")
        assert asked.is_set()
    finally:
        answered.set()
