"""Layer name patterns in configs: plain names, globs with ``*`` and ``?``, regular expressions after ``re:``.

Configs are untrusted, and one line of text can make a backtracking matcher run forever. The package ``regex``, which
transformers needs anyway, matches like ``re`` and has a timeout.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from aiakq.errors import AiakqError, error

MAX_PATTERN = 8192
MAX_NAME = 1024
#: Seconds for one name; real patterns need microseconds.
_TIMEOUT = 0.5
#: Seconds of processor time left for all patterns of a file; None without a limit.
_left: ContextVar[float | None] = ContextVar("left", default=None)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the processor time of all patterns that are compiled and matched inside, together.

    ``match_regex`` then raises ``format_unsupported`` for the pattern that exceeds it.
    """
    token = _left.set(seconds)
    try:
        yield
    finally:
        _left.reset(token)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches the module ``name``; regular expressions match at its beginning, as ``re.match``.

    Raises ``format_unsupported`` for a pattern that is too long, malformed or too costly.
    """
    if is_plain(pattern):
        return pattern == name
    text = pattern[3:] if pattern.startswith("re:") else glob_to_regex(pattern)
    return match_regex(text, name) is not None


def match_regex(text: str, name: str, refused: Callable[[str, str], AiakqError] | None = None) -> Any:
    """Match a regular expression at the beginning of ``name``; returns its match object, or None.

    refused  returns the error for an expression that is too long, malformed or too costly, from the expression and the
             reason. ``format_unsupported`` if not given.
    """
    refused = refused or _refused
    if len(name) > MAX_NAME:
        raise refused(text, f"a name has {len(name)} characters, at most {MAX_NAME} are read")
    left = _left.get()
    if left is not None and left <= 0:
        raise refused(text, "the patterns of this file take too long to match")
    started = time.thread_time()
    try:
        return _compiled(text).match(name, timeout=_TIMEOUT)
    except _Unusable as failure:
        raise refused(text, str(failure)) from None
    except TimeoutError:
        raise refused(text, "it takes too long to match") from None
    finally:
        if left is not None:
            _left.set(left - (time.thread_time() - started))


def is_plain(pattern: str) -> bool:
    """Whether the pattern is a name and nothing else."""
    return not (pattern.startswith("re:") or "*" in pattern or "?" in pattern)


def glob_to_regex(pattern: str) -> str:
    """The regular expression (without ``re:``) equivalent to a glob or a plain name."""
    pieces = {"*": ".*", "?": "."}
    return "^" + "".join(pieces.get(char) or re.escape(char) for char in pattern) + "$"


class _Unusable(Exception):
    """An expression that does not compile."""


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    import regex  # imported late: the command line imports this module before it matches anything

    if len(text) > MAX_PATTERN:
        raise _Unusable(f"it has {len(text)} characters, at most {MAX_PATTERN} are read")
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError, MemoryError) as problem:
        # Without the position, which is that in an expression around the one in the file.
        raise _Unusable(getattr(problem, "msg", "") or str(problem) or type(problem).__name__) from None


def _refused(text: str, reason: str) -> AiakqError:
    return error("format_unsupported", reason=f"the layer pattern {text[:60]!r} cannot be used: {reason}")
