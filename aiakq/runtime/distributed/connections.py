"""Connections between ranks of several machines: both ends prove that they know a secret before anything else is read.

The end that listens sends 32 random bytes. The other answers with 32 of its own, who it is, and their HMAC-SHA256; it
gets an HMAC back. Nothing that arrives before is longer than that or waited for longer than a few seconds, and many
who know no secret keep out nobody who does. What follows is authenticated by this beginning only, and not encrypted:
for private networks.
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

#: Host and port, or the name of a local socket that has no file (its first character is NUL).
Address = tuple[str, int] | str

#: What a connection is for: messages of rank 0; columns and alarms within a stage; hidden states; shared memory.
CONTROL, DATA, ALARM, LINK, MEMORY = range(5)

SECRET_BYTES = 32
_NONCE_BYTES = _PROOF_BYTES = 32
_PEER = struct.Struct(">II")
_ANSWER_BYTES = _NONCE_BYTES + _PEER.size + _PROOF_BYTES
#: Seconds for proving to know the secret, and how many may be about to at a time; more take the place of the oldest.
PROOF_SECONDS = 5.0
MAX_UNPROVEN = 64
#: An idle connection is looked after from so many seconds on, this often, and ends when so many times nobody answers.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))


class Peer(NamedTuple):
    """Who connects, and what for."""

    rank: int
    purpose: int


def new_secret() -> bytes:
    """For one group of ranks."""
    return secrets.token_bytes(SECRET_BYTES)


def shown(address: Address) -> str:
    """An address as users write it."""
    if isinstance(address, str):
        return address.replace("\0", "@", 1)
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass
class _Unproven:
    """A connection of which it is not known who is at the other end."""

    socket: socket.socket
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    answer: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts connections of those who know the secret.

    address  where: with the port that the system has chosen.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        """host: one address of this machine, never all of them; empty: a local socket without a file."""
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
        """The next peer that has proven to know the secret, and a blocking socket to it. Raises TimeoutError."""
        deadline = time.monotonic() + time_limit
        while True:
            self._drop_old(time.monotonic())
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.data is None:
                    self._accept_one()
                elif (found := self._read(key.data)) is not None:
                    return found

    def close(self) -> None:
        """Stop listening. Connections that were accepted stay."""
        while self._unproven:
            self._drop(self._unproven[0])
        self._selector.close()
        self._socket.close()

    def _drop_old(self, now: float) -> None:
        while self._unproven and (len(self._unproven) > MAX_UNPROVEN or self._unproven[0].deadline < now):
            self._drop(self._unproven[0])

    def _drop(self, one: _Unproven) -> None:
        self._forget(one)
        one.socket.close()

    def _forget(self, one: _Unproven) -> None:
        self._unproven.remove(one)
        self._selector.unregister(one.socket)

    def _accept_one(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:  # it has gone again, or this process has no descriptor left for it
            return
        accepted.setblocking(False)
        one = _Unproven(accepted, time.monotonic() + PROOF_SECONDS)
        self._unproven.append(one)
        self._selector.register(accepted, selectors.EVENT_READ, one)
        try:
            accepted.sendall(one.nonce)  # there is room: nothing was sent before
        except OSError:
            self._drop(one)

    def _read(self, one: _Unproven) -> tuple[Peer, socket.socket] | None:
        if one not in self._unproven:  # dropped in this turn
            return None
        try:
            data = one.socket.recv(_ANSWER_BYTES - len(one.answer))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        one.answer += data
        if data and len(one.answer) < _ANSWER_BYTES:
            return None
        nonce, peer, proof = (bytes(part) for part in _parts(one.answer))
        if not hmac.compare_digest(proof, _proof(self._secret, b"connects", one.nonce, nonce, peer)):
            self._drop(one)
            return None
        self._forget(one)
        try:
            one.socket.sendall(_proof(self._secret, b"listens", one.nonce, nonce, peer))
            _settle(one.socket)
        except OSError:
            one.socket.close()
            return None
        return Peer(*_PEER.unpack(peer)), one.socket


def connect(address: Address, secret: bytes, own: Peer, other: int, time_limit: float) -> socket.socket:
    """A blocking socket to the listener at ``address``, of the rank ``other``, which knows ``secret``.

    Tries again until the time is over. Raises ``rank_unreachable``.
    """
    deadline = time.monotonic() + time_limit
    reason = "there was no time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return connect_once(address, secret, own, min(left, 2 * PROOF_SECONDS))
        except OSError as failure:
            reason = failure.strerror or str(failure) or type(failure).__name__
            if isinstance(failure, PermissionError):
                break
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
    raise error(
        "rank_unreachable",
        rank=own.rank,
        here=_own_address(address),
        other=other,
        there=shown(address),
        limit=time_limit,
        reason=reason.rstrip("."),
    )


def connect_once(address: Address, secret: bytes, own: Peer, limit: float) -> socket.socket:
    """As ``connect``, but with one attempt. Raises OSError."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        deadline = time.monotonic() + limit
        sock.settimeout(limit)
        sock.connect(address)
        challenge = _receive_exactly(sock, _NONCE_BYTES, deadline)
        nonce, peer = secrets.token_bytes(_NONCE_BYTES), _PEER.pack(*own)
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


def _parts(answer: bytearray) -> tuple[bytearray, bytearray, bytearray]:
    end = _NONCE_BYTES + _PEER.size
    return answer[:_NONCE_BYTES], answer[_NONCE_BYTES:end], answer[end:]


def _proof(secret: bytes, side: bytes, challenge: bytes, nonce: bytes, peer: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((b"aiakq ranks", side, challenge + nonce + peer)), "sha256")


def _settle(sock: socket.socket) -> None:
    """Blocking, without delay, and not open for ever where nobody answers."""
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _own_address(there: Address) -> str:
    """From where packets to ``there`` would go."""
    if isinstance(there, str):
        return "this machine"
    with contextlib.suppress(OSError), socket.socket(_family(there), socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
    return "an unknown address"


def _family(address: tuple[str, int]) -> int:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
