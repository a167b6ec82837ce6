"""Connections between machines: peers without the secret are rejected, and cannot keep out peers that know it."""

from __future__ import annotations

import ast
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiakq
from aiakq.errors import AiakqError
from aiakq.runtime.distributed import connections
from aiakq.runtime.distributed.connections import Listener, Peer, connect, new_secret

SECRET = bytes(range(32))


@pytest.fixture(params=["127.0.0.1", ""], ids=["tcp", "local"])
def listener(request) -> Iterator[Listener]:
    listener = Listener(request.param, SECRET)
    yield listener
    listener.close()


@pytest.fixture
def tcp() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", SECRET)
    yield listener
    listener.close()


class Connecting(threading.Thread):
    """A peer that connects, in a thread; ``result()`` is its socket, or raises."""

    def __init__(self, listener: Listener, secret: bytes = SECRET, limit: float = 10.0) -> None:
        super().__init__(daemon=True)
        self._listener, self._secret, self._limit = listener, secret, limit
        self._found: socket.socket | AiakqError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = connect(self._listener.address, self._secret, Peer(3, 7), 0, self._limit)
        except AiakqError as failure:
            self._found = failure

    def result(self) -> socket.socket:
        self.join(20)
        assert self._found is not None
        if isinstance(self._found, AiakqError):
            raise self._found
        return self._found


def raw(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address)


def test_both_ends_of_a_connection_can_use_it(listener):
    other = Connecting(listener)
    peer, ours = listener.accept(10)
    theirs = other.result()
    assert peer == Peer(3, 7)
    for one, two in ((ours, theirs), (theirs, ours)):
        one.sendall(b"hidden states")
        assert two.recv(100) == b"hidden states"
    assert ours.gettimeout() is None and theirs.gettimeout() is None
    if ours.family == socket.AF_INET:
        for sock in (ours, theirs):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_wrong_secret_is_not_accepted(listener):
    other = Connecting(listener, new_secret(), limit=0.5)
    with pytest.raises(TimeoutError):
        listener.accept(1)
    with pytest.raises(AiakqError, match="before it had proven to know the secret"):
        other.result()


def test_a_listener_that_does_not_know_the_secret_is_rejected():
    """It sends a challenge and an invalid proof, and learns nothing of use."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = server.accept()
        sock.sendall(bytes(32))
        answer = sock.recv(1000)
        sock.sendall(answer[-32:])  # echoes the peer's own proof
        received.append(sock.recv(1000))

    received: list[bytes] = []
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(AiakqError, match="does not know the secret") as failure:
        connect(server.getsockname(), SECRET, Peer(1, 0), 0, 0.3)
    thread.join(5)
    server.close()
    assert failure.value.id == "rank_unreachable" and received == [b""]


def test_garbage_incomplete_handshakes_and_silence_do_not_keep_out_a_rank(tcp, monkeypatch):
    monkeypatch.setattr(connections, "PROOF_SECONDS", 0.5)
    chance = random.Random(5)
    bad = []
    for number in range(60):
        sock = raw(tcp)
        kind = number % 4
        if kind:  # otherwise the connection stays silent
            sock.sendall(chance.randbytes(chance.choice([1, 31, 71, 72, 5000]) if kind < 3 else 10))
        if kind == 3:
            sock.shutdown(socket.SHUT_WR)
        bad.append(sock)
    other = Connecting(tcp)
    began = time.monotonic()
    peer, ours = tcp.accept(10)
    assert peer == Peer(3, 7) and time.monotonic() - began < 5
    other.result().close()
    ours.close()
    with pytest.raises(TimeoutError):
        tcp.accept(1)
    for sock in bad:  # all were closed after their time limit
        sock.settimeout(5)
        with sock:
            try:
                while sock.recv(1000):
                    pass
            except ConnectionResetError:
                pass


def test_sending_byte_by_byte_does_not_extend_the_time_limit(tcp, monkeypatch):
    monkeypatch.setattr(connections, "PROOF_SECONDS", 0.4)
    sock = raw(tcp)
    sock.settimeout(5)
    closed = []

    def drip() -> None:
        try:
            while True:
                sock.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            closed.append(time.monotonic())

    thread = threading.Thread(target=drip, daemon=True)
    began = time.monotonic()
    thread.start()
    with pytest.raises(TimeoutError):
        tcp.accept(1.5)
    thread.join(5)
    assert closed and closed[0] - began < 1.5
    sock.close()


def test_the_oldest_handshake_is_dropped_beyond_the_maximum(tcp, monkeypatch):
    monkeypatch.setattr(connections, "MAX_UNPROVEN", 8)
    bad = [raw(tcp) for _ in range(40)]
    other = Connecting(tcp)
    assert tcp.accept(10)[0] == Peer(3, 7)
    assert len(tcp._unproven) <= 9
    other.result().close()
    for sock in bad:
        sock.close()


def test_an_unreachable_address_is_named_with_the_own_address():
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(AiakqError) as failure:
        connect(("127.0.0.1", port), SECRET, Peer(2, 0), 0, 0.3)
    assert time.monotonic() - began < 5
    assert "Rank 2, at 127.0.0.1, could not connect to rank 0, at 127.0.0.1:" in failure.value.message
    assert "Connection refused" in failure.value.message


def test_wildcard_addresses_are_refused():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="every address"):
            Listener(host, SECRET)


def test_messages_to_ranks_contain_no_pickle():
    folder = Path(aiakq.__file__).parent / "runtime" / "distributed"
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "multiprocessing"}
    for path in [*folder.glob("*.py"), *folder.parent.glob("loader/*rank*.py"), *folder.parent.glob("executor/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
