"""Connections between ranks on several machines, with a handshake in which both ends prove that they know a secret.

The listener sends a nonce of 32 random bytes. The connecting end replies with a nonce of its own, its identity, and an
HMAC-SHA256 of all of these; the listener returns an HMAC in turn. Before the handshake completes, the listener reads no
more than those bytes and waits no longer than a few seconds, and any number of unauthenticated connections cannot keep
out an authenticated one. Only the handshake is authenticated and nothing is encrypted, so this is for private networks.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from aiakq.errors import error

#: Host and port, or the name of a Unix socket in the abstract namespace (its first character is NUL).
Address = tuple[str, int] | str

#: Purposes of connections: control messages of rank 0; collectives and their interrupts within a stage; hidden states
#: between stages; descriptors of shared memory.
CONTROL, DATA, ALARM, LINK, MEMORY = range(5)

SECRET_BYTES = 32
_NONCE_BYTES = _PROOF_BYTES = 32
_PEER = struct.Struct(">II")
_ANSWER_BYTES = _NONCE_BYTES + _PEER.size + _PROOF_BYTES
#: Time limit of the handshake in seconds, and the maximum number of concurrent handshakes; beyond that the oldest is
#: dropped.
PROOF_SECONDS = 5.0
MAX_UNPROVEN = 64
#: TCP keepalive: idle seconds before the first probe, seconds between probes, unanswered probes until the connection
#: ends; and the timeout of sent data in milliseconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))


class Peer(NamedTuple):
    """The peer of a connection: its rank, and the purpose of the connection."""

    rank: int
    purpose: int


def new_secret() -> bytes:
    """Return a new shared secret for one group of ranks."""
    return secrets.token_bytes(SECRET_BYTES)


def shown(address: Address) -> str:
    """Return an address as it is written in messages."""
    if isinstance(address, str):
        return address.replace("\0", "@", 1)
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass
class _Unproven:
    """An accepted connection whose handshake is not complete."""

    socket: socket.socket
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    reply: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts connections from peers that know the secret.

    address  address that it listens at, with the port that the system has chosen.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        """Start listening.

        host  one address of this machine, never a wildcard address; empty for a Unix socket in the abstract namespace.
        """
        self._secret = secret
        if not host:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind("\0aiakq-" + secrets.token_hex(16))
            self.address: Address = self._socket.getsockname().decode()
        else:
            if ipaddress.ip_address(host).is_unspecified:
                raise ValueError(f"{host} is every address of this machine")
            self._socket = socket.socket(_family((host, 0)), socket.SOCK_STREAM)
            try:
                self._socket.bind((host, 0))
            except OSError:
                self._socket.close()
                raise
            self.address = self._socket.getsockname()[:2]
        self._socket.listen(2 * MAX_UNPROVEN)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._unproven: list[_Unproven] = []  # the oldest first

    def accept(self, time_limit: float) -> tuple[Peer, socket.socket]:
        """Return the next authenticated peer, and a blocking socket to it. Raises TimeoutError."""
        deadline = time.monotonic() + time_limit
        while True:
            self._drop_old(time.monotonic())
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.data is None:
                    self._accept_one()
                elif (accepted := self._read(key.data)) is not None:
                    return accepted

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        while self._unproven:
            self._drop(self._unproven[0])
        self._selector.close()
        self._socket.close()

    def _drop_old(self, now: float) -> None:
        while self._unproven and (len(self._unproven) > MAX_UNPROVEN or self._unproven[0].deadline < now):
            self._drop(self._unproven[0])

    def _drop(self, connection: _Unproven) -> None:
        self._forget(connection)
        connection.socket.close()

    def _forget(self, connection: _Unproven) -> None:
        self._unproven.remove(connection)
        self._selector.unregister(connection.socket)

    def _accept_one(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:  # the peer has disconnected, or this process is out of descriptors
            return
        accepted.setblocking(False)
        connection = _Unproven(accepted, time.monotonic() + PROOF_SECONDS)
        self._unproven.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        try:
            accepted.sendall(connection.nonce)  # fits into the empty send buffer
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Unproven) -> tuple[Peer, socket.socket] | None:
        if connection not in self._unproven:  # dropped since the select call
            return None
        try:
            data = connection.socket.recv(_ANSWER_BYTES - len(connection.reply))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        connection.reply += data
        if data and len(connection.reply) < _ANSWER_BYTES:
            return None
        nonce, peer, proof = (bytes(part) for part in _parts(connection.reply))
        if not hmac.compare_digest(proof, _proof(self._secret, b"connects", connection.nonce, nonce, peer)):
            self._drop(connection)
            return None
        self._forget(connection)
        try:
            connection.socket.sendall(_proof(self._secret, b"listens", connection.nonce, nonce, peer))
            _settle(connection.socket)
        except OSError:
            connection.socket.close()
            return None
        return Peer(*_PEER.unpack(peer)), connection.socket


def connect(address: Address, secret: bytes, this_peer: Peer, other: int, time_limit: float) -> socket.socket:
    """Connect to the listener of rank ``other`` at ``address`` and return a blocking socket.

    Retries until ``time_limit`` seconds have passed. Raises ``rank_unreachable``.
    """
    deadline = time.monotonic() + time_limit
    reason = "the time limit left no time to connect"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return connect_once(address, secret, this_peer, min(left, 2 * PROOF_SECONDS))
        except OSError as failure:
            reason = failure.strerror or str(failure) or type(failure).__name__
            if isinstance(failure, PermissionError):
                break
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
    raise error(
        "rank_unreachable",
        rank=this_peer.rank,
        here=_own_address(address),
        other=other,
        there=shown(address),
        limit=time_limit,
        reason=reason.rstrip("."),
    )


def connect_once(address: Address, secret: bytes, this_peer: Peer, limit: float) -> socket.socket:
    """Like ``connect``, but with a single attempt of at most ``limit`` seconds. Raises OSError."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        deadline = time.monotonic() + limit
        sock.settimeout(limit)
        sock.connect(address)
        challenge = _receive_exactly(sock, _NONCE_BYTES, deadline)
        nonce, peer = secrets.token_bytes(_NONCE_BYTES), _PEER.pack(*this_peer)
        sock.sendall(nonce + peer + _proof(secret, b"connects", challenge, nonce, peer))
        proof = _receive_exactly(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"listens", challenge, nonce, peer)):
            raise PermissionError("what listens there does not know the secret of the ranks")
        _settle(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        data = sock.recv(count - len(received))
        if not data:
            raise OSError("the other end closed the connection before it had proven to know the secret")
        received += data
    return received


def _parts(reply: bytearray) -> tuple[bytearray, bytearray, bytearray]:
    end = _NONCE_BYTES + _PEER.size
    return reply[:_NONCE_BYTES], reply[_NONCE_BYTES:end], reply[end:]


def _proof(secret: bytes, side: bytes, challenge: bytes, nonce: bytes, peer: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((b"aiakq ranks", side, challenge + nonce + peer)), "sha256")


def _settle(sock: socket.socket) -> None:
    """Make a socket blocking, without Nagle's delay, and with keepalive so that a dead peer is detected."""
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _own_address(destination: Address) -> str:
    """Return the address of this machine from which packets to ``destination`` are sent."""
    if isinstance(destination, str):
        return "this machine"
    with contextlib.suppress(OSError), socket.socket(_family(destination), socket.SOCK_DGRAM) as probe:
        probe.connect(destination)
        return str(probe.getsockname()[0])
    return "an unknown address"


def _family(address: tuple[str, int]) -> int:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
