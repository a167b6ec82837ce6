"""Patterns of layer names in configs: plain names, globs with ``*`` and ``?``, and regular expressions after ``re:``.

Configs come from strangers, and one line of text can make a backtracking matcher run for ever. The package ``regex``
(which transformers needs anyway) matches what ``re`` does and stops when its time is up.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from aiakq.errors import AiakqError, error

MAX_PATTERN = 8192
MAX_NAME = 1024
#: Seconds for one name; real patterns need some microseconds.
_PATIENCE = 0.5


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means the module ``name``; a regular expression need only fit the beginning, as ``re.match``.

    Raises ``format_unsupported`` for a pattern that is too long, malformed or too costly.
    """
    if is_plain(pattern):
        return pattern == name
    text = pattern[3:] if pattern.startswith("re:") else glob_to_regex(pattern)
    if len(name) > MAX_NAME:
        raise _refused(text, f"a name has {len(name)} characters, at most {MAX_NAME} are read")
    try:
        return _compiled(text).match(name, timeout=_PATIENCE) is not None
    except TimeoutError:
        raise _refused(text, "it takes too long to match") from None


def is_plain(pattern: str) -> bool:
    """Whether the pattern is a name and nothing else."""
    return not (pattern.startswith("re:") or "*" in pattern or "?" in pattern)


def glob_to_regex(pattern: str) -> str:
    """The regular expression (without ``re:``) that a glob or a plain name stands for."""
    pieces = {"*": ".*", "?": "."}
    return "^" + "".join(pieces.get(char) or re.escape(char) for char in pattern) + "$"


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    import regex  # not at the top: the command line needs this module before it needs patterns

    if len(text) > MAX_PATTERN:
        raise _refused(text, f"it has {len(text)} characters, at most {MAX_PATTERN} are read")
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError, MemoryError) as problem:
        raise _refused(text, str(problem) or type(problem).__name__) from None


def _refused(text: str, reason: str) -> AiakqError:
    return error("format_unsupported", reason=f"the layer pattern {text[:60]!r} is not understood: {reason}")
