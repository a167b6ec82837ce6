"""JSON schemas of the arguments of tools in the form that grammars enforce, which also checks calls in other text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache

from aiakq.runtime.protocol.unicode_text import well_formed

#: What a tool without a schema takes.
NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Maximum number of schemas that are kept, and of characters of each; of longer ones, only the last are kept.
_CACHED, _MAX_CACHED_CHARS, _LONG_CACHED = 512, 1 << 14, 8


def clean_arguments(text: str, is_strict: bool) -> tuple[dict[str, object], tuple[str, ...]]:
    """The schema of arguments with the JSON ``text`` in keywords that grammars enforce, and what is not enforced.

    is_strict  refuse what cannot be enforced instead of dropping it.

    Raises as ``clean_schema``.
    """
    clean = _cached if len(text) <= _MAX_CACHED_CHARS else _cached_long
    return clean(text, is_strict)


def _cleaned(text: str, is_strict: bool) -> tuple[dict[str, object], tuple[str, ...]]:
    from aiakq.runtime.structured.schemas import clean_schema  # most servers never need it

    cleaned, dropped = clean_schema(json.loads(text), closed=True, only_objects=True, lenient=not is_strict)
    return cleaned, tuple(dropped)


_cached = lru_cache(_CACHED)(_cleaned)
_cached_long = lru_cache(_LONG_CACHED)(_cleaned)


class EnforcedSchemas(Mapping[str, Mapping[str, object]]):
    """Tool name -> schema of its arguments as grammars enforce it, which is computed when it is needed.

    given  the schemas as clients write them.
    """

    def __init__(self, given: Mapping[str, Mapping[str, object]]) -> None:
        self._given = given
        self._found: dict[str, Mapping[str, object]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __getitem__(self, name: str) -> Mapping[str, object]:
        given = self._given[name]
        if not given:
            return NO_ARGUMENTS
        if name not in self._found:
            text = well_formed(json.dumps(given, ensure_ascii=False))
            self._found[name] = clean_arguments(text, False)[0]  # a strict tool has nothing that is dropped
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)
