"""Text that is not Unicode: lone surrogates, halves of characters that a client cut at a UTF-16 unit."""

from __future__ import annotations

import re

_SURROGATES = re.compile("[\ud800-\udfff]")
_PAIRS = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def has_surrogates(text: str) -> bool:
    """Whether ``text`` has surrogates, so that it cannot be encoded as UTF-8."""
    return not text.isascii() and _SURROGATES.search(text) is not None


def well_formed(text: str) -> str:
    """Return ``text`` with pairs of surrogates joined to one character, and U+FFFD in place of every other one."""
    if not has_surrogates(text):
        return text
    joined = _PAIRS.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    return _SURROGATES.sub("\ufffd", joined)
