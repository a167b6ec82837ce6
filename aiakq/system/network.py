"""Whether another machine answers. Standard library only."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

#: Seconds to connect.
_CONNECT_SECONDS = 5.0


def answers(url: str) -> bool:
    """Whether a connection to the server of ``url`` can be opened; True if there is a proxy, which alone could tell."""
    from urllib.request import getproxies  # imported late: every process imports this module

    if getproxies():
        return True
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
