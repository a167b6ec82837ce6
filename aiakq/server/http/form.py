"""Parses forms (multipart/form-data, RFC 7578) with python-multipart, which is imported with the first."""

from __future__ import annotations

import email.message
from dataclasses import dataclass, field
from typing import Any

from aiakq.errors import AiakqError, error, first_line

#: Parts of a form, the bytes of the headers of one, and those of one that is no file.
MAX_PARTS, MAX_HEADER_BYTES, MAX_VALUE_BYTES = 64, 4 << 10, 64 << 10


@dataclass
class FormPart:
    """A field of a form.

    filename  of a file; None for a text.
    """

    name: str = ""
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


def parse_form(body: bytes, content_type: str) -> list[FormPart]:
    """Return the fields of a form in their order.

    Raises ``form_malformed``, also for too many parts or too long headers and texts, and ``no_soundfile`` without
    python-multipart.
    """
    try:
        from python_multipart.multipart import MultipartParser
    except ImportError:
        raise error("no_soundfile") from None
    boundary = _parameters(content_type).get("boundary", "")
    if not boundary or len(boundary) > 200:
        raise malformed("Content-Type has no boundary")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary.encode("latin-1"), reader.callbacks())
        parser.write(body)
        parser.finalize()
    except AiakqError:
        raise
    except Exception as failure:  # its own errors, and those of what a client may have sent
        raise malformed(first_line(failure).rstrip(".")[:200]) from None
    if not reader.is_complete:
        raise malformed("it ends before its last boundary")
    return reader.parts


class _Reader:
    """Collects the parts of a form."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.is_complete = False
        self._name, self._value, self._header_bytes = bytearray(), bytearray(), 0

    def callbacks(self) -> Any:
        """Return the functions that the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add(self._name, data[start:end]),
            "on_header_value": lambda data, start, end: self._add(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise malformed(f"it has more than {MAX_PARTS} parts")
        self.parts.append(FormPart())
        self._header_bytes = 0

    def _add(self, to: bytearray, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise malformed(f"the headers of a part are longer than {MAX_HEADER_BYTES} bytes")
        to += data

    def _end_header(self) -> None:
        if bytes(self._name).strip().lower() == b"content-disposition":
            stated = _parameters(self._value.decode(errors="replace"))
            self.parts[-1].name = stated.get("name", "")
            self.parts[-1].filename = stated.get("filename")
        self._name.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        if not self.parts[-1].name:
            raise malformed("a part has no name")

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if part.filename is None and part.name != "file" and len(part.data) + end - start > MAX_VALUE_BYTES:
            raise malformed(f"the field {part.name:.64} is longer than {MAX_VALUE_BYTES} bytes")
        part.data += data[start:end]

    def _end(self) -> None:
        self.is_complete = True


def malformed(reason: str) -> AiakqError:
    """Return the error for a form that cannot be read."""
    return error("form_malformed", reason=reason)


def _parameters(header: str) -> dict[str, str]:
    """Return the parameters of a header such as Content-Type."""
    message = email.message.Message()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ")
    found = message.get_params(failobj=[], unquote=True)[1:]
    return {name.lower(): value for name, value in found if isinstance(value, str)}
