"""Clean JSON schemas: of any draft and in any spelling, converted to the keywords that llguidance enforces.

Keywords that exclude nothing are dropped, some are expressed by others, and the rest is refused by name; if
``lenient``, it is dropped instead, for tools that are not strict and whose schemas are enforced as far as possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.runtime.protocol.grammar import not_enforceable
from aiakq.runtime.structured.plain_schemas import NOTES, SCALARS, is_plain, plain_schema
from aiakq.runtime.structured.refusals import place_of, shortened
from aiakq.runtime.structured.schema_documents import Base, SchemaDocument, Target
from aiakq.runtime.structured.schema_multiples import can_combine, without_multiples
from aiakq.runtime.structured.schema_node import SchemaNode
from aiakq.runtime.structured.schema_values import Schema, are_disjoint, is_well_formed

#: Formats whose expressions take long to compile, and the keywords of schemas that share one of them.
_SHARED = ("date-time", "time")
_OF_SHARED = NOTES | {"type", "format"}
#: Keywords that may exclude every value.
_EMPTYING = ("not", "enum", "const", "oneOf", "anyOf", "allOf")


def clean_schema(
    schema: object, *, closed: bool = False, only_objects: bool = False, lenient: bool = False
) -> tuple[dict[str, object], list[str]]:
    """``schema`` in keywords that llguidance enforces, and what of it is not enforced, a short text for each.

    closed        objects have only the properties that the schema names.
    only_objects  values are objects, as the arguments of a tool.
    lenient       what cannot be enforced is dropped instead of refused.

    Raises ``grammar_not_enforceable`` without a parameter.
    """
    try:
        cleaner = SchemaCleaner(SchemaDocument(schema), closed, lenient)
        root = cleaner.root(only_objects)
    except RecursionError:
        raise not_enforceable("", "the schema is nested too deeply") from None
    return root, list(dict.fromkeys(cleaner.dropped))


class SchemaCleaner:
    """Cleans the schemas of a document.

    closed      see ``clean_schema``.
    is_lenient  see ``clean_schema``.
    dropped     what is not enforced.
    """

    def __init__(self, document: SchemaDocument, closed: bool, lenient: bool) -> None:
        self.closed = closed
        self.dropped: list[str] = []
        self._document, self.is_lenient = document, lenient
        self._names: dict[tuple[int, bool], str] = {}
        self._definitions: dict[str, Schema] = {}
        self._pending: list[tuple[str, Target, bool]] = []
        self._one_of: list[dict[str, Any]] = []
        self._has_multiples = False

    def root(self, only_objects: bool) -> dict[str, object]:
        """The clean schema of the document."""
        root, base = self._document.root, self._document.base
        if only_objects and isinstance(root, dict) and "$ref" not in root and "type" not in root:
            root = {"type": "object", **root}
        result = self.schema(root, base, self.closed)
        if only_objects and (not isinstance(result, dict) or result.get("type") != "object"):
            result = (
                False if result is False else {"type": "object", "allOf": [result]} if result else {"type": "object"}
            )
        while self._pending:
            name, target, closed = self._pending.pop()
            self._definitions[name] = self.schema(target.schema, target.base, closed)
        for part in self._one_of:
            self._finish_one_of(part)
        if self._has_multiples:
            self._finish_multiples([result, *self._definitions.values()])
        if not isinstance(result, dict):
            if not self.is_lenient:
                named = next(
                    (f'"{keyword}" in ' for keyword in _EMPTYING if isinstance(root, dict) and keyword in root), ""
                )
                raise not_enforceable("", f"{named}the schema allows no value")
            self.dropped.append("a schema that allows no value")
            result = {"type": "object"} if only_objects else {}
        return {**result, "$defs": self._definitions} if self._definitions else result

    def refuse(self, *keywords: str, reason: str = "cannot be enforced") -> None:
        """Refuse ``keywords``, or note that they are dropped."""
        names = ", ".join(f'"{keyword:.64}"' for keyword in keywords)
        self._refuse(f"{names} in the schema {reason}")

    def refuse_pattern(self, pattern: str, part: str) -> None:
        """Refuse ``pattern``, which has a ``part`` that cannot be enforced, or note that it is dropped."""
        place = place_of(self._document.root, pattern) or "pattern"
        self._refuse(f"the pattern {shortened(pattern)} at {place} has {part}; write it without one")

    def _refuse(self, text: str) -> None:
        if not self.is_lenient:
            raise not_enforceable("", text)
        self.dropped.append(text)

    def schema(self, value: object, base: Base, closed: bool) -> Schema:
        """The clean form of ``value``: {} allows everything, False nothing; ``closed``: of this schema."""
        if isinstance(value, bool):
            return {} if value else False
        if not isinstance(value, dict):
            self.refuse(str(value), reason="is not a schema, which is an object or a boolean")
            return {}
        if len(value) == 1 and value.get("type") in SCALARS:
            return {"type": value["type"]}
        if is_plain(value):
            inner = closed if "anyOf" in value else self.closed
            plain = plain_schema(value, lambda part: self.schema(part, base, inner), closed)
            if self.is_lenient and isinstance(plain, dict) and "properties" in value and "properties" in plain:
                self.keep_types(value, plain["properties"], base)
            return plain
        base = base.inside(value)
        if base.is_declared and base.draft < 2019 and isinstance(value.get("$ref"), str):
            return self.reference(value["$ref"], base, closed)
        known = {}
        for keyword, each in value.items():
            if not base.knows(keyword):
                continue
            if is_well_formed(keyword, each):
                known[keyword] = each
            else:
                self.refuse(keyword, reason="has a value that JSON Schema does not allow")
        if known.get("format") in _SHARED and value.get("type") == "string" and _OF_SHARED >= value.keys():
            return self._shared(SchemaNode(self, known, base, closed), known["format"])
        self._has_multiples |= "multipleOf" in known
        return SchemaNode(self, known, base, closed).clean()

    def _shared(self, node: SchemaNode, name: str) -> Schema:
        """A reference to the clean form of ``node``, which is compiled once for all strings of the format ``name``."""
        if name not in self._definitions:
            self._definitions[name] = node.clean()
        return {"$ref": f"#/$defs/{name}"}

    def keep_types(self, given: Mapping[str, Any], properties: dict[str, Schema], base: Base) -> None:
        """Keep the types of required ``properties`` that allow no value: an empty ``enum``, for example."""
        for name in given.get("required", ()):
            declared = given["properties"].get(name) if properties.get(name) is False else None
            if isinstance(declared, dict):
                self.refuse(name, reason="is required and allows no value")
                kind = {"type": declared["type"]} if "type" in declared else {}
                properties[name] = self.schema(kind, base, self.closed)

    def reference(self, reference: str, base: Base, closed: bool) -> Schema:
        """The clean form of what ``reference`` refers to."""
        target = self._document.find(reference, base)
        if target is None or not isinstance(target.schema, (dict, bool)):
            self.refuse("$ref", reason=f"refers to {reference[:128]!r}, which is not part of it")
            return {}
        return self._definition(target, closed)

    def dynamic_reference(self, keyword: str, reference: str, base: Base, closed: bool) -> Schema:
        """The clean form of what ``reference`` of ``keyword`` refers to, if that is the same wherever it is used."""
        document = self._document
        document.index()
        name = reference.removeprefix("#")
        if keyword == "$recursiveRef":
            is_static = document.num_resources <= 1 or not document.has_recursive_anchor
        else:
            is_static = name not in document.dynamic_anchors or len(document.dynamic_anchors[name]) == 1
        if not is_static or not reference.startswith("#"):
            self.refuse(keyword)
            return {}
        return self.reference(reference, base, closed)

    def one_of(self, parts: list[Schema]) -> Schema:
        """Exactly one of ``parts``. Whether they exclude each other is decided when all references are known."""
        part = {"oneOf": parts}
        self._one_of.append(part)
        return part

    def _finish_one_of(self, part: dict[str, Any]) -> None:
        parts = part.pop("oneOf")
        if not are_disjoint(parts, self._resolved):
            self.refuse("oneOf", reason="has alternatives that may be valid at once, which cannot be excluded")
        part["anyOf"] = parts

    def _finish_multiples(self, schemas: list[Schema]) -> None:
        if not can_combine(schemas, self._resolved):
            self.refuse("multipleOf", reason="has values that cannot be enforced together; use ones of fewer digits")
            without_multiples(schemas)

    def _resolved(self, reference: str) -> Schema:
        return self._definitions.get(reference.rpartition("/")[2], {})

    def _definition(self, target: Target, closed: bool) -> Schema:
        if isinstance(target.schema, bool):
            return {} if target.schema else False
        key = (target.key, closed)
        name = self._names.get(key)
        if name is None:
            self._names[key] = name = f"d{len(self._names)}"
            self._pending.append((name, target, closed))
        return {"$ref": f"#/$defs/{name}"}
