"""The listening socket."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import stat

from aiakq.errors import AiakqError, error

BACKLOG = 2048
_OPEN_FILES = 65536
#: Number of files that a server has open besides connections, with a margin.
_OWN_FILES = 32


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ``port_in_use``, or ``bad_option`` for an address of another machine."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name like localhost may resolve to both families; clients that try only one use IPv4.
        family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as failure:
        raise _bad_host(host, failure) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Binding alone does not claim the port against another server that is still loading; listening does.
        listener.listen(BACKLOG)
    except OSError as failure:
        listener.close()
        if failure.errno == errno.EADDRINUSE:
            raise error("port_in_use", host=host, port=port) from None
        raise _bad_host(host, failure) from None
    return listener


def bind_unix(path: str) -> socket.socket:
    """Return a listening Unix domain socket, replacing a stale one. Raises ``bad_option``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as failure:
        listener.close()
        expected = f"a path where a socket can be made ({failure.strerror or failure})"
        hint = "Give a path of at most 107 bytes in a folder that exists, at which nothing listens."
        raise error("bad_option", option="--uds", value=path, expected=expected, hint=hint) from None
    return listener


def _is_abandoned(path: str) -> bool:
    """Whether there is a stale socket at ``path``, on which no process listens."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _bad_host(host: str, failure: OSError) -> AiakqError:
    hint = "Use 127.0.0.1, or 0.0.0.0 for every address of this machine; ports below 1024 need privileges."
    reason = failure.strerror or str(failure)
    return error(
        "bad_option", option="--host", value=host, expected=f"an address that can be used ({reason})", hint=hint
    )


def url_of(listener: socket.socket, host: str, tls: bool = False) -> str:
    """Return the URL of ``listener`` for clients on this machine; "unix:" and the path for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        address = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    elif host == "localhost":
        address = host
    scheme = "https" if tls else "http"
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1024, towards the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def fitting_connections(requested: int) -> int:
    """Return the maximum number of connections: ``requested``, or half of what the limit on open files allows."""
    return min(requested, _spare_files() // 2)


def fitting_backlog() -> int:
    """Return the number of connections accepted at a time, and of refused connections that may linger.

    If no file descriptor is left, accepting fails and logs an error for every waiting connection.
    """
    return min(BACKLOG, _spare_files() // 8)


def _spare_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _OPEN_FILES if soft == resource.RLIM_INFINITY else max(soft - _OWN_FILES, 8)
