"""Images in ``aiakq chat``: files, which are sent as data URLs, and URLs, which the server reads."""

from __future__ import annotations

import base64
import mimetypes
import re

from aiakq.errors import error
from aiakq.system.user_path import user_path

#: Largest file, which is that of aiakq's server.
MAX_FILE_BYTES = 32 << 20
#: URLs that are sent as they are. A letter and a colon are a drive, not a scheme.
_URL = re.compile(r"(https?|file|data):", re.IGNORECASE)


def image_url(source: str, name: str) -> str:
    """Return the URL of an image for a request. ``source`` is a file or a URL, and ``name`` what errors call it.

    Raises ``bad_option`` for a file that cannot be read or is too large.
    """
    if _URL.match(source):
        return source
    path = user_path(source)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise error("bad_option", option=name, value=source, expected="a file or URL", hint=f"{reason}.") from None
    if len(data) > MAX_FILE_BYTES:
        expected = f"a file of at most {MAX_FILE_BYTES >> 20} MiB"
        raise error("bad_option", option=name, value=source, expected=expected, hint="Make it smaller.")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def message_content(text: str, images: list[str]) -> str | list[dict[str, object]]:
    """Return the content of a message with these images before its text."""
    if not images:
        return text
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return [*parts, {"type": "text", "text": text}]
