"""Frames over a stream socket: a 4-byte big-endian length, then a body."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct(">I")


def framed(body: bytes) -> bytes:
    """Return ``body`` prefixed with its length."""
    return LENGTH.pack(len(body)) + body


def receive_frame(sock: socket.socket) -> bytes | None:
    """Receive the body of one frame from a blocking socket; None if the peer is gone. Raises ConnectionError."""
    head = receive_exactly(sock, LENGTH.size)
    return None if head is None else receive_exactly(sock, LENGTH.unpack(head)[0])


def receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    """Receive ``count`` bytes from a blocking socket; None if the peer is gone before. Raises ConnectionError."""
    received = bytearray()
    while len(received) < count:
        piece = sock.recv(min(1 << 20, count - len(received)))
        if not piece:
            return None
        received += piece
    return bytes(received)


def limit_sending(sock: socket.socket, seconds: float) -> None:
    """Make a blocking ``send`` raise BlockingIOError after ``seconds``."""
    whole, rest = divmod(seconds, 1.0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
