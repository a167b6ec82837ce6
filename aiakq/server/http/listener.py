"""The socket a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket

from aiakq.errors import AiakqError, error

BACKLOG = 2048
_OPEN_FILES = 65536


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``port_in_use``, or ``bad_option`` for an address this machine does not have."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name like localhost may resolve to both families; clients that try only one try IPv4.
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
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


def _bad_host(host: str, failure: OSError) -> AiakqError:
    hint = "Use 127.0.0.1, or 0.0.0.0 for every address of this machine; ports below 1024 need privileges."
    reason = failure.strerror or str(failure)
    return error(
        "bad_option", option="--host", value=host, expected=f"an address that can be used ({reason})", hint=hint
    )


def url_of(listener: socket.socket, host: str, tls: bool = False) -> str:
    """The URL under which a client on this machine reaches ``listener``."""
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
