"""Sizes as users write them: 24GiB, 5GB, 500 MB. Standard library only."""

from __future__ import annotations

import re

from aiakq.errors import error

#: The letter alone is a power of ten, the smaller of the two meanings that people give it.
_UNITS = {"m": 10**6, "g": 10**9, "t": 10**12, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}) ?([mgt](?:i?b)?)")


def byte_size(word: str) -> int | None:
    """Return the bytes of a size, at least one; None for other words."""
    match = _SIZE.fullmatch(word.strip().lower())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    return size or None


def shard_bytes(option: str | None) -> int | None:
    """Return the value of ``--max-shard-size``, or None. Raises ``bad_option``."""
    size = None if option is None else byte_size(option)
    if option is not None and size is None:
        raise error("bad_option", option="--max-shard-size", value=option, expected="a size like 5GB", hint="")
    return size
