"""A client of plain sockets, which leaves the interpreter lock to the other threads of its process."""

from __future__ import annotations

import socket
import threading
import time

from raw_http import TIMEOUT

from aiakq.server.background import RunningServer


def connect(server: RunningServer) -> socket.socket:
    """Connect to ``server``."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=2 * TIMEOUT)


def send(
    connection: socket.socket, method: str, path: str, key: str = "", body: bytes = b"", close: bool = False
) -> None:
    """Send one request, with the API key ``key`` if there is one."""
    fields = {
        "host": "127.0.0.1",
        "content-length": str(len(body)),
        **({"authorization": f"Bearer {key}"} if key else {}),
        **({"connection": "close"} if close else {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)


def post(server: RunningServer, path: str, body: bytes, key: str = "") -> tuple[int, bytes]:
    """Post ``body``, read the whole response, and return its status and first bytes."""
    with connect(server) as connection:
        send(connection, "POST", path, key, body, close=True)
        response = connection.recv(1 << 16)
        while connection.recv(1 << 20):
            pass
    return int(response[9:12]), response


class Pings(threading.Thread):
    """Gets ``path`` every ``pause`` seconds until ``stop``; ``longest`` is the longest response time in seconds."""

    def __init__(self, server: RunningServer, path: str, pause: float, key: str = "") -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self._path, self._pause, self._key = path, pause, key
        self._connection = connect(server)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._pause):
            began = time.monotonic()
            send(self._connection, "GET", self._path, self._key)
            self._connection.recv(4096)
            self.longest = max(self.longest, time.monotonic() - began)

    def stop(self) -> float:
        """End the thread and return ``longest``."""
        self._ended.set()
        self.join()
        self._connection.close()
        return self.longest
