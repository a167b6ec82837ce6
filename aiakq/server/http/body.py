"""Reads request bodies, with limits on size and JSON structure.

JSON allows duplicate keys in an object, and parsers differ in which value they use. A gateway in front of this server
may have validated the other value, so such a body is refused.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
import re
from collections.abc import Iterable

from starlette.requests import Request

from aiakq.errors import error

MAX_DEPTH = 64
MAX_KEYS = 30_000
#: Maximum number of values in a body, unless the model's context is longer.
MAX_VALUES = 200_000
#: Bodies up to this size in bytes are parsed at once, without delaying other requests.
_SMALL_BYTES = 64 << 10
#: A string, terminated or not. Possessive quantifiers keep matching linear for malformed input.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?+)*+(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def read_body(request: Request, limit: int, num_values: int = 0) -> bytes:
    """Read the whole body of a JSON request of up to ``num_values`` values, or MAX_VALUES if that is more.

    Raises request_too_large (before reading, if content-length says so), unsupported_encoding,
    unsupported_media_type, and what ``check_values`` and ``check_structure`` raise.
    """
    media_type = _media_type(request)
    if media_type not in ("", "application/json") and not re.fullmatch(r"application/[\w.-]+\+json", media_type):
        raise error("unsupported_media_type")
    body = as_utf8(await _read_limited(request, limit))
    if len(body) > _SMALL_BYTES:
        # Yield to other tasks between the steps.
        await asyncio.sleep(0)
        check_values(body, max(MAX_VALUES, num_values))
        await asyncio.sleep(0)
    check_structure(body)
    if len(body) > _SMALL_BYTES:
        await asyncio.sleep(0)
    return bytes(body)


async def read_form(request: Request, limit: int, num_values: int = 0) -> bytes:
    """Read the whole body of a form; ``num_values`` is of JSON. Raises as ``read_body``, and ``form_expected``."""
    if _media_type(request) not in ("", "multipart/form-data"):
        raise error("form_expected")
    return bytes(await _read_limited(request, limit))


def _media_type(request: Request) -> str:
    """Return the type of a body. Raises ``unsupported_encoding``."""
    if request.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise error("unsupported_encoding")
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read_limited(request: Request, limit: int) -> bytearray:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise error("request_too_large", limit=limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise error("request_too_large", limit=limit)
    return body


def as_utf8(body: bytearray) -> bytearray:
    """Return ``body`` without a byte order mark; one of UTF-16 is converted. Raises ``invalid_json``."""
    if body.startswith(codecs.BOM_UTF8):
        return body[len(codecs.BOM_UTF8) :]
    if not body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return body
    try:
        return bytearray(body.decode("utf-16").encode())
    except UnicodeError:
        raise error("invalid_json", reason="it is neither UTF-8 nor UTF-16") from None


def check_values(body: bytes | bytearray, max_values: int) -> None:
    """Raise ``invalid_json`` for too many values."""
    plain = bytes(body).replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    outside = b"" if num_strings > 2 * max_values else b"".join(plain.split(b'"')[::2])
    if num_strings > 2 * max_values or outside.count(b",") >= max_values:
        raise error("invalid_json", reason=f"it has more than {max_values} values")


def check_structure(body: bytes | bytearray) -> None:
    """Raise ``invalid_json`` for too deep nesting or too many keys, ``duplicate_key`` for a duplicate key.

    Malformed JSON is left to the parser, whose message is more precise.
    """
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_brackets(_STRING.sub(b"", body).translate(None, _NOT_BRACKETS))
    num_keys = 0

    def check_keys(pairs: list[tuple[str, object]]) -> None:
        nonlocal num_keys
        num_keys += len(pairs)
        if num_keys > MAX_KEYS:
            raise error("invalid_json", reason=f"it has more than {MAX_KEYS} keys")
        if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
            name = _first_duplicate(key for key, _ in pairs)[:64]
            raise error("duplicate_key", param=name.encode(errors="replace").decode())

    try:
        # Numbers are not converted, which takes quadratic time for long ones.
        json.loads(body, object_pairs_hook=check_keys, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return


def _check_brackets(brackets: bytes | bytearray) -> None:
    """Raise ``invalid_json`` for too many or too deeply nested ``brackets``, which are those outside of strings."""
    if len(brackets) > 2 * MAX_KEYS:
        raise error("invalid_json", reason=f"it has more than {MAX_KEYS} lists and objects")
    if max(itertools.accumulate(_STEPS[bracket] for bracket in brackets), default=0) > MAX_DEPTH:
        raise error("invalid_json", reason=f"it is nested deeper than {MAX_DEPTH} levels")


def _first_duplicate(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
