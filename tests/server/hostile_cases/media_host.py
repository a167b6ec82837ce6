"""A hostile host of media: redirects to private addresses, endless bodies, broken and slow answers."""

from __future__ import annotations

import contextlib
import functools
import gzip
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile_cases import media
from hostile_cases.media import picture

#: Seconds after which it gives up a connection, which the server is to do before.
_SECONDS = 60.0


#: Paths that are redirected -> where to.
_MOVED = {
    "moved": "/good.png",
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "loopback": "http://localhost:1/",
    "loop": "/loop",
    "to-file": "file:///etc/passwd",
    "to-data": "data:image/png;base64,aGk=",
    "to-nothing": "",
    "bad-location": "http://[::1/\x01",
}


@functools.cache
def _answers() -> dict[str, bytes]:
    """The answers that end, by path."""
    image = picture("PNG")

    def answer(body: bytes = image, *headers: str, status: str = "200 OK") -> bytes:
        return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body

    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in image) + b"0\r\n\r\n"
    found = {
        path: answer(b"", f"location: {to}", "content-length: 0", status="302 Found") for path, to in _MOVED.items()
    }
    return found | {
        "good.png": answer(image, "content-type: image/png"),
        "text-type": answer(image, "content-type: text/html"),
        "chunked": answer(pieces, "transfer-encoding: chunked"),
        "long-headers": answer(image, "x: " + "y" * 30_000),
        "html": answer(b"<html><img src=x>", "content-type: image/png"),
        "missing": answer(status="404 Not Found"),
        "failing": answer(status="500 Oops"),
        "empty": answer(b"", "content-length: 0"),
        "cut": answer(image, f"content-length: {2 * len(image)}"),
        "closed": b"",
        "no-http": b"\x16\x03\x01SSH-2.0-x\r\n\r\n" + image,
        "gzip": answer(gzip.compress(bytes(50_000_000), 1), "content-encoding: gzip"),
        "huge": answer(b"x" * (33 << 20), "content-length: 99999999999"),
        "negative": answer(image, "content-length: -1"),
        "many-headers": answer(image, *(f"x{number}: y" for number in range(50_000))),
        "many-lines": b"HTTP/1.1 200 OK\r\n" + b"\r" * 200_000,
        "continue": answer(b"", status="100 Continue") * 20 + answer(b""),
    }


def _go_on(connection: socket.socket, path: str) -> None:
    """Send without an end, at full speed or slowly, until the server leaves."""
    if path != "silent":
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + (b"x: " if path == "slow-headers" else b"\r\n"))
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        if path == "endless":
            connection.sendall(bytes(1 << 20))
            continue
        time.sleep(0.1)
        if path == "silent":
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if not connection.recv(1):
                    return
        else:
            connection.sendall(b"x")


def _serve(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_SECONDS)
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := connection.recv(1 << 16)):
                return
            head += piece
        path = head.split(b" ", 2)[1].decode("latin-1").lstrip("/")
        if path in _answers():
            connection.sendall(_answers()[path])
        else:
            _go_on(connection, path)


@contextlib.contextmanager
def media_host() -> Iterator[str]:
    """Yield the address of the host, HOST:PORT, which ends with the context."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=_serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def media_server(stack: contextlib.ExitStack, kind: str) -> dict[str, Any]:
    """Return the arguments of a server of a tiny model that reads media of a kind: image, audio or video, also from the
    hostile host. Both end with ``stack``.
    """
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from audio_models import save_audio_model
    from vision_models import save_vision_model

    media.host[0] = stack.enter_context(media_host())
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / kind
    if kind == "audio":
        save_audio_model("qwen2_audio", folder)
    else:
        save_vision_model("idefics3" if kind == "image" else "qwen3_vl", folder)
    limits = {"image": ["image"], "video": ["image", "video"], "audio": ["audio"]}[kind]
    return {
        "model": str(folder),
        "unknown_fields": "refuse",
        "served_model_name": [kind],
        "dtype": "float32",
        "max_model_len": 512,
        "num_gpu_blocks_override": 1025,
        "limit_mm_per_prompt": dict.fromkeys(limits, 4),
        "allowed_media_domains": ["127.0.0.1"],
        "max_connections_per_address": 1000,
        "enable_auto_tool_choice": True,
    }
