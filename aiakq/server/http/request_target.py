"""Targets of request lines that are whole addresses."""

from __future__ import annotations

import re

_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")
_END_OF_AUTHORITY = re.compile(rb"[/?#]")
_AUTHORITY = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


def split_absolute(target: bytes, method: bytes = b"GET") -> tuple[bytes, bytes | None]:
    """Return path with query, and host with port, of a request target in absolute form (RFC 9112, 3.2.2).

    A target without a path stands for /, and with OPTIONS for * (3.2.4).

    The host is None for targets of other forms, such as * and host:port. Raises ValueError for a scheme other than http
    and https, and for a host with a user name or characters that hosts do not have.
    """
    scheme, separator, rest = target.partition(b"://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return target, None
    end = _END_OF_AUTHORITY.search(rest)
    host, path = (rest, b"") if end is None else (rest[: end.start()], rest[end.start() :])
    if scheme.lower() not in (b"http", b"https") or not _AUTHORITY.fullmatch(host):
        raise ValueError(target)
    if not path and method == b"OPTIONS":
        return b"*", host
    return (path if path[:1] == b"/" else b"/" + path), host
