"""JSON schemas as documents: their drafts, and what their references refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urldefrag, urljoin

from aiakq.runtime.structured.schema_values import Schema

#: The newest draft, which also applies where none is declared.
NEWEST = 2020
_DRAFT = re.compile(r"json-schema\.org/(?:draft-0([3-7])|draft/(2019-09|2020-12))/")
#: The drafts in which a keyword is known, from the first to the last; all others are known in every draft.
_DRAFTS = {
    **dict.fromkeys(("const", "contains", "propertyNames"), (6, NEWEST)),
    **dict.fromkeys(("if", "then", "else"), (7, NEWEST)),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), (2019, NEWEST)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (2019, NEWEST)),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), (2020, NEWEST)),
    "$recursiveRef": (2019, 2019),
}
#: Keywords that set the base of a schema.
_BASES = frozenset(("$schema", "$id", "id"))
#: Keywords by the kind of their values.
SCHEMAS = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


@dataclass(frozen=True)
class Base:
    """What the keywords of a schema mean: its draft, whether that is declared, and its base URI."""

    draft: int = NEWEST
    is_declared: bool = False
    uri: str = ""

    def knows(self, keyword: str) -> bool:
        """Whether ``keyword`` has a meaning in the draft; where none is declared, in any draft."""
        first, last = _DRAFTS.get(keyword, (0, NEWEST))
        return not self.is_declared or first <= self.draft <= last

    def inside(self, schema: Mapping[str, Any]) -> Base:
        """The base of ``schema``, which may set its own identifier and draft."""
        if _BASES.isdisjoint(schema):
            return self
        draft, is_declared = self.draft, self.is_declared
        if isinstance(schema.get("$schema"), str) and (match := _DRAFT.search(schema["$schema"])):
            draft, is_declared = int((match[1] or match[2])[:4]), True
        own = schema.get("id" if is_declared and draft < 6 else "$id")
        ignored = is_declared and draft < 2019 and isinstance(schema.get("$ref"), str)
        if not isinstance(own, str) or ignored or own.startswith("#"):
            return Base(draft, is_declared, self.uri)
        return Base(draft, is_declared, urldefrag(_joined(self.uri, own))[0])


_NO_BASE = Base()


@dataclass(frozen=True)
class Target:
    """A schema that a reference refers to, and its base. ``key`` is the same for the same schema."""

    key: int
    schema: Any
    base: Base


class SchemaDocument:
    """A JSON schema with everything in it that has an identifier or an anchor."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.base = _NO_BASE.inside(root) if isinstance(root, dict) else _NO_BASE
        self.dynamic_anchors: dict[str, list[Target]] = {}
        self.num_resources = 0
        self.has_recursive_anchor = False
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self._is_indexed = False

    def index(self) -> None:
        """Look for identifiers and anchors, before what refers to them is used: most documents have none."""
        if self._is_indexed:
            return
        self._is_indexed = True
        root = Target(id(self.root), self.root, self.base)
        self._resources[self.base.uri] = root
        for target in _subschemas(root):
            self._note(target)

    def find(self, reference: str, base: Base) -> Target | None:
        """The schema that ``reference`` refers to where ``base`` applies; None: it is not in the document."""
        self.index()
        uri, fragment = urldefrag(_joined(base.uri, reference) if not reference.startswith("#") else reference)
        if reference.startswith("#"):
            uri = base.uri
        resource = self._resources.get(uri)
        if resource is None:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        return _at(resource, fragment)

    def _note(self, target: Target) -> None:
        schema, base = target.schema, target.base
        own = schema.get("id" if base.is_declared and base.draft < 6 else "$id")
        if isinstance(own, str) and own.startswith("#"):
            self._anchors.setdefault((base.uri, own[1:]), target)
        elif isinstance(own, str):
            self.num_resources += 1
            self._resources.setdefault(base.uri, target)
            if (fragment := urldefrag(own)[1]) and not fragment.startswith("/"):
                self._anchors.setdefault((base.uri, fragment), target)
        self.has_recursive_anchor |= schema.get("$recursiveAnchor") is True
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors.setdefault((base.uri, schema[keyword]), target)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self.dynamic_anchors.setdefault(schema["$dynamicAnchor"], []).append(target)


class Cleaner(Protocol):
    """What a schema needs of the document that it is in; see ``SchemaCleaner``."""

    closed: bool
    is_lenient: bool

    def refuse(self, *keywords: str, reason: str = "cannot be enforced") -> None: ...

    def refuse_pattern(self, pattern: str, part: str) -> None: ...

    def schema(self, value: Any, base: Base, closed: bool) -> Schema: ...

    def reference(self, reference: str, base: Base, closed: bool) -> Schema: ...

    def dynamic_reference(self, keyword: str, reference: str, base: Base, closed: bool) -> Schema: ...

    def one_of(self, parts: list[Schema]) -> Schema: ...

    def keep_types(self, given: Mapping[str, object], properties: dict[str, Schema], base: Base) -> None: ...


def _subschemas(target: Target) -> Iterator[Target]:
    """The schema of ``target``, and all inside it."""
    pending = [target]
    while pending:
        target = pending.pop()
        if not isinstance(target.schema, dict):
            continue
        yield target
        for keyword, value in target.schema.items():
            parts: list[object] = []
            if keyword in SCHEMAS and isinstance(value, dict):
                parts = [value]
            elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
                parts = value
            elif keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
                parts = list(value.values())
            pending += [Target(id(part), part, target.base.inside(part)) for part in parts if isinstance(part, dict)]


def _at(resource: Target, pointer: str) -> Target | None:
    """The schema at a JSON ``pointer`` in ``resource``."""
    value, base = resource.schema, resource.base
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
        if isinstance(value, dict) and part not in ("properties", *MAPS_OF_SCHEMAS):
            base = base.inside(value)
    return Target(id(value), value, base)


def _joined(base: str, reference: str) -> str:
    """``reference`` as an absolute URI; ``urljoin`` knows no ``urn:``."""
    try:
        return urljoin(base, reference) if not base.startswith("urn:") or ":" in reference else reference
    except ValueError:
        return reference
