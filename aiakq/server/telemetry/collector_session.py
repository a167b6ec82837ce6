"""CollectorSession: the HTTP session that sends traces, with limits on what a collector answers."""

from __future__ import annotations

import http.client
from typing import Any, BinaryIO

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

#: Bytes of an answer that are read, and ignored, so that its connection can be used again, and of its headers.
MAX_ANSWER_BYTES = 1 << 16
MAX_HEADER_BYTES = 1 << 16


class CollectorSession(requests.Session):
    """A session that keeps no answers and follows no redirects, which would receive the keys in the headers."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter())

    def request(self, method: Any, url: Any, *args: Any, **options: Any) -> requests.Response:
        """Return the response without its body. Raises requests' exceptions, also for a redirect."""
        response = super().request(method, url, *args, **{**options, "stream": True, "allow_redirects": False})
        try:
            length = response.headers.get("content-length", "")
            if length.isdecimal() and int(length[:10]) <= MAX_ANSWER_BYTES:
                response.raw.read(decode_content=False)
        finally:
            response.close()
        response._content = b""
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"it redirects with status {response.status_code}, which is not followed")
        return response


class _HeaderReader:
    """The beginning of an answer, line by line, which ends with an error after ``MAX_HEADER_BYTES``."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self._left = MAX_HEADER_BYTES

    def readline(self, limit: int) -> bytes:
        line = self.stream.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.HTTPException(f"its headers are longer than {MAX_HEADER_BYTES} bytes")
        return line

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class _Response(http.client.HTTPResponse):
    """A response with bounded headers, interim ones (100 Continue) among them; Python allows 6.5 MB for each."""

    def begin(self) -> None:
        reader = _HeaderReader(self.fp)
        self.fp: Any = reader
        try:
            super().begin()
        finally:
            if self.fp is reader:
                self.fp = reader.stream


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _Adapter(HTTPAdapter):
    """Connections whose responses are bounded, also those through a proxy."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def proxy_manager_for(self, *args: Any, **options: Any) -> object:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return manager
