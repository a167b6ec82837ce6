"""What happens to request fields that no request model declares: refused, ignored, or ignored with a line in the log.

By default, a misspelled field is refused, and others are ignored. The response header x-ignored-fields has the names of
ignored fields.
"""

from __future__ import annotations

import functools
import logging
import re
import urllib.parse
from collections.abc import Callable, Collection
from contextvars import ContextVar

from aiakq.errors import AiakqError, error

logger = logging.getLogger("aiakq.server")

#: At most this many names of this many characters are in the header.
MAX_HEADER_NAMES, MAX_HEADER_CHARS = 10, 64
#: Different names per request that are compared with known ones, which takes a fraction of a millisecond each.
MAX_COMPARED = 64
#: Maximum number of unknown field names to log, since clients could send any number of them.
MAX_LOGGED_NAMES = 100
_LONGEST_COMPARED = 40
_INDEX = re.compile(r"\[\d+\]")


class IgnoredFields:
    """The ignored fields of one request.

    compared  names of unknown fields that were compared with those of known ones, ignored or not.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.compared: set[str] = set()

    def may_compare(self, name: str) -> bool:
        """Whether ``name`` is among the first ``MAX_COMPARED`` different names."""
        if name not in self.compared and len(self.compared) < MAX_COMPARED:
            self.compared.add(name)
        return name in self.compared

    def header(self) -> str:
        """Return the value of x-ignored-fields: names separated by commas, percent-encoded; "" for an empty one."""
        return ", ".join(_quoted(name) for name in list(self.names)[:MAX_HEADER_NAMES])


def _quoted(name: str) -> str:
    """Return a name for the header: percent-encoded, cut after a whole character, a name or key without one as ""."""
    if not name or name.endswith("."):
        return f'{urllib.parse.quote(name, safe="[]")[: MAX_HEADER_CHARS - 2]}""'
    quoted = ""
    for character in name[:MAX_HEADER_CHARS]:
        encoded = urllib.parse.quote(character, safe="[]", errors="replace")
        if len(quoted) + len(encoded) > MAX_HEADER_CHARS:
            break
        quoted += encoded
    return quoted


#: Those of the request that is being handled.
ignored_fields: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


class UnknownFields:
    """The handling of unknown fields.

    mode      refuse: status 400. ignore: misspelled fields are refused, others ignored. warn: all are ignored, with one
              log line per name.
    on_ignore  called for every ignored field.
    """

    def __init__(self, mode: str = "refuse", on_ignore: Callable[[], None] = lambda: None) -> None:
        self.mode = mode
        self._on_ignore = on_ignore
        self._logged: set[str] = set()

    @property
    def refuses(self) -> bool:
        return self.mode == "refuse"

    def check(self, param: str, name: str, known: Collection[str]) -> None:
        """Raise ``unknown_field`` for the field ``name`` at ``param``, unless it is to be ignored."""
        request = ignored_fields.get()
        compares = self.refuses or (self.mode == "ignore" and (request is None or request.may_compare(name)))
        near = nearest(name, frozenset(known)) if compares else None
        if near is not None:
            raise error("unknown_field", param=param, hint=f"Did you mean {near}?")
        if self.refuses:
            hint = "Remove it, or check its spelling; a server with --unknown-fields ignore ignores it."
            raise error("unknown_field", param=param, hint=hint)

    def ignore(self, failure: AiakqError) -> None:
        """Ignore the field that would otherwise be refused with ``failure``."""
        name = _INDEX.sub("[]", failure.param or "")
        request = ignored_fields.get()
        if request is not None and name not in request.names:
            request.names[name] = None
            self._on_ignore()
        if self.mode == "warn" and name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
            self._logged.add(name)
            logger.warning("ignored in requests: %s", ascii(failure.message))


#: Refuses all, for requests to administrate.
REFUSE = UnknownFields()


@functools.lru_cache(maxsize=1024)
def nearest(name: str, known: frozenset[str]) -> str | None:
    """Return the name in ``known`` that ``name`` is a misspelling of, or None.

    Upper and lower case, underscores and hyphens make no difference. Names of four characters may differ in one
    insertion, deletion, replacement or swap, names of nine in two. In names of three, a letter in the middle may be
    missing. A name with a word more or less is another name.
    """
    folded = _fold(name)
    if not folded or len(folded) > _LONGEST_COMPARED:
        return None
    best: tuple[int, str] | None = None
    for other in sorted(known):
        candidate = _fold(other)
        allowed = 0 if min(len(folded), len(candidate)) < 4 else 1 if len(folded) < 9 else 2
        if len(folded) == 3 and len(candidate) == 4 and folded[0] + folded[-1] == candidate[0] + candidate[-1]:
            allowed = 1
        if abs(len(folded) - len(candidate)) > allowed or _differ_in_words(name, other):
            continue
        distance = _distance(folded, candidate)
        if distance <= allowed and (best is None or distance < best[0]):
            best = distance, other
    return None if best is None else best[1]


def _differ_in_words(name: str, other: str) -> bool:
    """Whether one of two names has all words of the other, and further ones."""
    words, others = (set(re.findall(r"[^\s_-]+", each.lower())) for each in (name, other))
    return words < others or others < words


def _fold(name: str) -> str:
    return re.sub(r"[\s_-]", "", name[: 2 * _LONGEST_COMPARED]).lower()


def _distance(one: str, two: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbours between two strings."""
    before: list[int] = []
    row = list(range(len(two) + 1))
    for i, letter in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(two, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
