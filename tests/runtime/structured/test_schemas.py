"""Schemas found in practice: keywords without meaning are dropped, others are enforced or refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import Grammar, grammar_of
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.ecma_patterns import from_ecma
from aiakq.runtime.structured.schemas import clean_schema

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]
RECORD = {"type": "object", "additionalProperties": {"type": "boolean"}}
SEVEN, FOUR = "http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema#"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, [256]).resized(257, [256]))


def accepts(compiler: GrammarCompiler, grammar: Grammar, value: Any) -> bool:
    matcher = compiler.matcher(grammar)
    for byte in json.dumps(value, ensure_ascii=False).encode():
        if matcher._matcher.validate_tokens([byte]) == 0:
            return False
        matcher.advance(byte)
    return matcher.failure is None and (matcher.is_finished or matcher._matcher.is_accepting())


def of(schema: Any) -> Grammar:
    found = grammar_of("x", {"json": schema})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # keywords that exclude nothing
        (RECORD | {"propertyNames": {"type": "string"}}, [{"a": True}], [{"a": 1}]),
        (RECORD | {"propertyNames": {"description": "a key"}}, [{"a": True}], [{"a": 1}]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False}, [[1, 1]], [[3]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
        ({"type": "string", "uniqueItems": True, "contains": {"const": 1}, "maxLength": 1}, ["a"], ["ab"]),
        ({"type": "boolean", "not": False, "allOf": [{}], "if": {"const": 1}, "dependentRequired": {}}, [True], [1]),
        ({"type": "integer", "not": {"not": {}}, "then": {"const": 1}, "patternProperties": {}}, [3], ["a"]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0, "items": {"const": 2}}, [[2]], [[1]]),
        ({"type": "object", "unevaluatedProperties": True, "required": ["a"]}, [{"a": 1}], [{}]),
        (
            {
                "type": "null",
                "deprecated": True,
                "readOnly": True,
                "writeOnly": False,
                "$comment": "x",
                "examples": [3],
            },
            [None],
            [3],
        ),
        ({"type": "string", "format": "password", "maxLength": 2}, ["ab"], ["abc"]),
        ({"type": "string", "format": "int32", "contentEncoding": "base64", "minLength": 1}, ["?"], [""]),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["ab"], ["", "abc"]),
        # keywords that others express
        ({"properties": {"a": {"not": {}}}, "type": "object"}, [{}, {"b": 1}], [{"a": 1}]),
        ({"not": {"type": "null"}}, [1, "a"], [None]),
        ({"type": "object", "not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}]),
        (RECORD | {"propertyNames": {"pattern": "^x"}}, [{"xy": True}], [{"y": True}, {"xy": 1}]),
        (RECORD | {"propertyNames": {"enum": ["a", "b"]}}, [{"a": True, "b": False}], [{"c": True}]),
        (RECORD | {"propertyNames": {"maxLength": 2}}, [{"ab": True}], [{"abc": True}]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {}},
                "patternProperties": {"^a$": {"minimum": 3}, "^(?:b|c c)$": {"type": "null"}},
                "additionalProperties": False,
            },
            [{"a": 3}, {"a": 4, "b": None, "c c": None}],
            [{"a": 2}, {"b": 1}, {"c c": 1}, {"c": None}],
        ),
        ({"type": "array", "contains": {}, "minContains": 2}, [[1, 2]], [[1]]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}, ["a", None], ["ab", 3]),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, [3, 5], [4]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"const": 1.0}, [1], [2]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [1024 - 2**63, 2**63 - 1],
            [-(2**63) - 1, 2**63],
        ),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, [2**53 + 2], [2**53 + 1]),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**60 + 512}, [2**60 + 511], [2**60 - 1, 2**60 + 513]),
        ({"type": "number", "minimum": -(10**17), "maximum": 0.1}, [-(10**17), 0.1], [-(10**17) - 1, 0.11]),
        ({"type": "integer", "enum": [2**60, 10**20]}, [2**60, 10**20], [2**60 + 1, 10**20 + 1]),
        ({"$recursiveRef": "#", "type": ["array", "null"], "items": {"$recursiveRef": "#"}}, [], []),
        ({"type": ["array", "null"], "items": {"$recursiveRef": "#"}}, [[None, []]], [[1]]),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "null"}}}, [None], [1]),
        ({"$ref": "#/components/a%20b", "components": {"a b": {"type": "string", "format": "binary"}}}, ["x"], [1]),
        # what a draft does not know
        ({"$schema": FOUR, "type": "integer", "const": 3, "if": {"const": 1}, "then": False}, [1, 2], ["a"]),
        ({"$schema": SEVEN, "type": "array", "prefixItems": [False], "unevaluatedItems": False}, [[1]], [1]),
        ({"$schema": SEVEN, "type": "string", "contentEncoding": "base64"}, ["YQ=="], ["YQ="]),
    ],
)
def test_schemas_mean_what_json_schema_says(compiler, schema, valid, invalid):
    try:
        grammar = of(schema)
        compiler.matcher(grammar)
    except AiakqError:
        assert not valid and not invalid
        return
    assert [value for value in valid if not accepts(compiler, grammar, value)] == []
    assert [value for value in invalid if accepts(compiler, grammar, value)] == []


def test_schemas_that_differ_in_a_property_exclude_each_other(compiler):
    def kind(name: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"const": name}, "n": {"type": "integer"}},
            "required": ["kind"],
        }

    references = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
    schema = {"oneOf": references, "discriminator": {"propertyName": "kind"}, "$defs": {"A": kind("a"), "B": kind("b")}}
    assert accepts(compiler, of(schema), {"kind": "b", "n": 1}) and not accepts(compiler, of(schema), {"kind": "c"})
    schema["$defs"]["B"] = kind("a")
    with pytest.raises(AiakqError, match='"oneOf" in the schema has alternatives that may be valid at once'):
        compiler.matcher(of(schema))


FORMATS = [
    ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-00-01"]),
    (
        "time",
        ["23:59:60Z", "01:29:60+01:30", "15:59:60.5-08:00"],
        ["22:59:60Z", "23:59:60+01:00", "12:00:60Z", "1:00:00Z"],
    ),
    (
        "date-time",
        ["1998-12-31T23:59:60Z", "2024-01-01t00:00:00.1+23:59"],
        ["1998-12-31T23:58:60Z", "2023-02-29T00:00:00Z"],
    ),
    ("duration", ["P1Y2M3DT4H", "PT5S", "P2W"], ["P", "P1YT", "P1W2D", "1D"]),
    ("email", ['"a b"@x.org', "a@[IPv6:::1]", "a.b@x.org"], ["a..b@x.org", "a b@x.org", "a@[1.2.3.300]", "@x"]),
    ("hostname", ["a--b.org", "x" * 63], ["x" * 64, "a_b", "-a", "a-", "a.", "xn--x", ".".join(["abcdefgh"] * 29)]),
    ("ipv4", ["0.255.1.20"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
    ("ipv6", ["::ffff:192.0.2.1", "1:2:3:4:5:6:7:8", "::"], ["1::2::3", "::ffff:1.2.3.04", "12345::", "1:2:3:4:5:6:7"]),
    ("uri", ["http://[::ffff:1.2.3.4]:80/a?b#c", "urn:a:b"], ["http://a b", "//a/b", "http://x/%A", "http:/[::1]"]),
    ("uri-reference", ["//a/b", "#x", ""], ["\\\\a\\b", "a b"]),
    ("iri", ["http://ƒøø.org/∂?é=π"], ["/é", "http://a\u0000"]),
    ("uri-template", ["a/{b:3}{?c,d*}"], ["{", "{a,}", "a}"]),
    ("json-pointer", ["/a~1b/~0", ""], ["a", "/~2"]),
    ("relative-json-pointer", ["0#", "12/a"], ["01", "/a", "#"]),
    ("uuid", ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
]


@pytest.mark.parametrize(("name", "valid", "invalid"), FORMATS, ids=[name for name, *_ in FORMATS])
def test_formats_are_enforced_exactly(compiler, name, valid, invalid):
    grammar = of({"type": "string", "format": name})
    assert [text for text in valid if not accepts(compiler, grammar, text)] == []
    if "pointer" not in name:  # whose last name may end with a line
        invalid = [*invalid, *(f"{text}\n" for text in valid)]
    assert [text for text in invalid if accepts(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"^\S$", ["a"], ["\ufeff", "\u2028", " "]),
        (r"^[\s]$", ["\ufeff", "\u00a0"], ["a"]),
        (r"^\d\w$", ["1a"], ["٣a", "1é"]),
        (r"^[^\W]$", ["a"], ["é", "-"]),
        (r"^.$", ["é"], ["\r", "\u2029"]),
        (r"^a{,2}$", ["a{,2}"], ["aa"]),
        (r"^[[&&a]$", ["[", "&", "a"], ["b"]),
        (r"^[^]\cA?$", ["x", "\n"], [""]),
        (r"^\u{1F600}|\uD83D\uDE00\/$", ["\U0001f600", "\U0001f600/"], ["/"]),
        (r"^\p{Lu}\x41\-$", ["ÉA-"], ["éA-"]),
        ("a]b}", ["xa]b}x"], ["ab"]),
    ],
)
def test_patterns_are_those_of_ecmascript(compiler, pattern, valid, invalid):
    grammar = of({"type": "string", "pattern": pattern})
    assert [text for text in valid if not accepts(compiler, grammar, text)] == []
    assert [text for text in invalid if accepts(compiler, grammar, text)] == []


def test_simple_patterns_are_not_changed():
    assert from_ecma("^(a|b)+c?$") == "^(a|b)+c?$"


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"not": {"type": "integer"}}, '"not"'),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2}, '"contains", "minContains"'),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, '"unevaluatedProperties"'),
        ({"type": "strnig"}, '"type" in the schema has a value'),
        ({"type": "object", "required": True}, '"required" in the schema has a value'),
        ({"$ref": "#/$defs/absent"}, "#/$defs/absent"),
        ({"$ref": "#"}, "no text matches"),
        ({"enum": []}, "allows no value"),
        ({"const": 1095398237498130433}, "beyond 2^53"),
        ({"properties": {"id": {"enum": [7, [-(2**63)]]}}}, "beyond 2^53"),
        ({"enum": ["a", {"b": float("inf")}]}, "beyond 2^53"),
        ({"type": "integer", "minimum": 2**53 + 1}, '"minimum" in the schema has a value'),
        ({"type": "integer", "exclusiveMaximum": 10**16}, '"exclusiveMaximum" in the schema has a value'),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, '"maximum" in the schema has a value'),
        ({"type": "integer", "maximum": 10**20}, '"maximum" in the schema has a value'),
        ({"type": "number", "minimum": -1.7976931348623157e308}, '"minimum" in the schema has a value'),
        ({"type": "number", "exclusiveMinimum": 5e-324}, '"exclusiveMinimum" in the schema has a value'),
        ({"type": "integer", "multipleOf": 10**9}, '"multipleOf" in the schema has a value'),
        ({"type": "number", "multipleOf": 0.07}, '"multipleOf" in the schema has a value'),
        ({"type": "object", "properties": {f"p{at}": {} for at in range(300)}}, '"properties"'),
        ({"anyOf": [{"type": "object", "required": [f"p{at}"]} for at in range(1100)]}, '"anyOf"'),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_dropped_by_name(compiler, schema, named):
    with pytest.raises(AiakqError) as caught:
        compiler.matcher(of(schema))
    assert named in str(caught.value)
    if named != "no text matches":
        cleaned, dropped = clean_schema(schema, lenient=True)
        assert any(named in each for each in dropped) or "allows no value" in dropped[0]
        compiler.matcher(of(cleaned))


@pytest.mark.parametrize("keywords", [{"enum": []}, {"enum": [1]}, {"const": None}, {"allOf": [False]}])
def test_a_required_property_without_values_keeps_its_type(compiler, keywords):
    schema = {"type": "object", "properties": {"a": {"type": "string", **keywords}, "b": {}}, "required": ["a"]}
    cleaned, dropped = clean_schema(schema, lenient=True)
    assert cleaned["properties"]["a"] == {"type": "string"} and '"a" in the schema' in dropped[0]
    optional, dropped = clean_schema({**schema, "required": []}, lenient=True)
    assert optional["properties"]["a"] is False and not dropped
    with pytest.raises(AiakqError):
        compiler.matcher(of(schema))


def test_nothing_may_follow_where_a_pattern_matches_only_names_that_are_taken(compiler):
    schema = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {"type": "integer"}}}
    matcher = compiler.matcher(of(schema | {"required": ["a"], "additionalProperties": False}))
    for byte in b'{"a":1':
        matcher.advance(byte)
    assert matcher._matcher.validate_tokens([ord(",")]) == 0 and matcher._matcher.validate_tokens([ord("}")]) == 1


def test_objects_are_closed_where_they_name_all_their_properties():
    own = {"type": "object", "properties": {"a": {"type": "null"}}}
    more = {"type": "object", "properties": {"b": {"type": "null"}}}
    assert clean_schema(own, closed=True)[0]["additionalProperties"] is False
    for schema in ({**own, "allOf": [more]}, {"allOf": [own, more]}, {**own, "anyOf": [more, {"required": ["a"]}]}):
        assert "additionalProperties" not in json.dumps(clean_schema(schema, closed=True)[0])
    alternatives = {"anyOf": [own, more]}
    assert json.dumps(clean_schema(alternatives, closed=True)[0]).count('"additionalProperties": false') == 2
    named = {"type": "object", "properties": {"properties": own, "type": {"type": "null"}}}
    assert set(clean_schema(named, closed=True)[0]["properties"]) == {"properties", "type"}


def test_chains_of_references_are_followed_to_any_length():
    definitions: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}", "title": "x"} for at in range(3000)}
    began = time.process_time()
    cleaned, _ = clean_schema({"$ref": "#/$defs/d0", "$defs": definitions | {"d3000": {"type": "null"}}})
    assert len(cleaned["$defs"]) == 3001 and time.process_time() - began < 5


@pytest.mark.parametrize("as_text", [False, True])
def test_halves_of_surrogate_pairs_become_replacement_characters(compiler, as_text):
    schema: Any = {"enum": ["a\ud800", "\ud83d\ude00"]}
    grammar = of(json.dumps(schema) if as_text else schema)
    assert accepts(compiler, grammar, "a\ufffd") and accepts(compiler, grammar, "\U0001f600")
    choice = grammar_of("x", {"choice": ["\udc00"]})
    assert choice is not None and json.loads(choice.text) == ["\ufffd"]
    for wrong in ({"properties": {"\ud800": {}}}, {"type": "object", "required": ["\ud800"]}):
        with pytest.raises(AiakqError) as caught:
            of(json.dumps(wrong) if as_text else wrong)
        assert caught.value.id == "invalid_type"


@pytest.mark.parametrize("kind", ["choice", "tags"])
def test_thousands_of_choices_can_be_followed_to_the_end(compiler, kind):
    texts = [f"choice {at}" for at in range(5000)]
    parts = [{"type": "const_string", "value": text} for text in texts]
    tags = {"format": {"type": "or", "elements": parts}}
    grammar = grammar_of("x", {"choice": texts} if kind == "choice" else {"structural_tag": tags})
    assert grammar is not None
    matcher = compiler.matcher(grammar)
    for byte in b"choice 4999":
        assert matcher._matcher.validate_tokens([byte])
        matcher.advance(byte)
    assert matcher.failure is None and matcher._matcher.is_accepting()


def test_a_format_that_takes_long_to_compile_is_compiled_once(compiler):
    time_of = {"type": "string", "format": "date-time", "description": "When"}
    schema = {"type": "object", "properties": dict.fromkeys("abc", time_of), "required": ["c"]}
    cleaned, _ = clean_schema(schema, closed=True)
    assert json.dumps(cleaned).count("pattern") == json.dumps(clean_schema(time_of)[0]).count("pattern")
    values = [{"a": "2024-02-29T01:29:60+01:30", "c": "2024-02-29T01:29:59Z"}, {"c": "2024-02-29T01:29:60+01:29"}]
    for each in (schema, cleaned):
        assert [accepts(compiler, of(each), value) for value in values] == [True, False]
