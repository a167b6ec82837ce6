"""Reloading of certificates that are renewed while the server runs."""

from __future__ import annotations

import logging
import os
import ssl

logger = logging.getLogger("aiakq.server")

#: Identity of a file's version, which changes when it is written or replaced; None for a missing file.
_State = tuple[int, int, int] | None


class CertificateFiles:
    """The files of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs, which ``refresh`` reloads when they change."""

    def __init__(self, certificate: str, key: str | None, authorities: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self._states = self._read_states()

    def refresh(self, context: ssl.SSLContext) -> None:
        """Load the files into ``context`` if they have changed; open connections are not affected.

        Files that do not match each other, as in the middle of a replacement, are ignored until they change again.
        """
        states = self._read_states()
        if states == self._states:
            return
        self._states = states
        try:
            self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_into(context)
        except (OSError, ValueError) as failure:
            logger.warning("the certificate was replaced, but cannot be used: %s; the old one stays", failure)
        else:
            logger.warning("the certificate was replaced: new connections use it")

    def _load_into(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key)
        if self._authorities:
            context.load_verify_locations(self._authorities)

    def _read_states(self) -> list[_State]:
        return [_state_of(path) for path in (self._certificate, self._key, self._authorities) if path]


def _state_of(path: str) -> _State:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
