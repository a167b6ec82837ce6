"""Grammars of structural tags."""

from __future__ import annotations

import json

from aiakq.runtime.structured.formats import schema, sequence, tag
from aiakq.runtime.structured.structural_tags import tag_grammar


def test_a_schema_that_occurs_several_times_is_compiled_once():
    numbers = [{"type": "object", "properties": {"a": {"type": "integer"}}} for _ in range(3)]
    parts = [tag(f"<{i}>", schema(each)) for i, each in enumerate(numbers)]
    cleaned = []

    def schema_of(value):
        cleaned.append(value)
        return value

    text = tag_grammar({"format": sequence(*parts, schema({"type": "string"}))}, schema_of, {})
    assert json.loads(text)["grammars"][0]["lark_grammar"].count("%json") == len(cleaned) == 2
