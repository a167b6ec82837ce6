"""HTML pages: self-contained files of ``aiakq.server.playground``, whose headers forbid external requests."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.responses import Response

#: The package that contains the files.
PACKAGE = "aiakq.server.playground"


def playground_page(servers: Iterable[str]) -> Response:
    """Return the playground page, which may also send requests to ``servers``."""
    return page_response("playground.html", servers)


def page_response(file: str, servers: Iterable[str] = ()) -> Response:
    """Return the page ``file``, which may send requests to its own origin and to ``servers``.

    Its scripts and styles are allowed by their hashes, so that model output can neither run code nor change styles.
    """
    content, script_hashes, style_hashes = _read(file)
    origins = {f"{url.scheme}://{url.netloc}" for url in map(urlsplit, servers) if url.netloc}
    policy = {
        "default-src": "'none'",
        "script-src": script_hashes,
        "style-src": style_hashes,
        "img-src": "data:",
        "connect-src": " ".join(["'self'", *sorted(origins)]),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


@functools.cache
def _read(file: str) -> tuple[bytes, str, str]:
    """Return the bytes of a page, and the Content-Security-Policy sources of its scripts and styles."""
    content = (files(PACKAGE) / file).read_bytes()
    return content, _hashes(content, b"script"), _hashes(content, b"style")


def _hashes(content: bytes, tag: bytes) -> str:
    """Return the hashes of the ``tag`` elements, in the format of a Content-Security-Policy."""
    elements = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), content, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(element).digest()).decode() for element in elements)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
