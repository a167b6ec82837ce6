"""CollectorSession: the HTTP session that sends traces, with limits on what a collector answers."""

from __future__ import annotations

from typing import Any

import requests

#: Bytes of an answer that are read, and ignored, so that its connection can be used again.
MAX_ANSWER_BYTES = 1 << 16


class CollectorSession(requests.Session):
    """A session that keeps no answers and follows no redirects, which would receive the keys in the headers."""

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
