"""From request fields to grammars, and from vocabularies to masks."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq import SamplingParams, StructuredOutputsParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.grammar import Grammar, GrammarDefaults, grammar_of
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.schemas import clean_schema

SINGLE = [bytes([byte]) for byte in range(256)]
#: Bytes, some longer tokens, two special ones, and an end.
TOKENS = [*SINGLE, b"ab", b'{"', b'": ', b"true", b"<call>", b"<|tool|>", b"<end>"]
SPECIAL = [TOKENS.index(b"<|tool|>"), TOKENS.index(b"<end>")]
END = SPECIAL[-1]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, SPECIAL).resized(len(TOKENS) + 70, [END]))


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = torch.zeros(matcher.num_words, dtype=torch.int32)
    matcher.fill_mask(mask.data_ptr())
    return {token for token in range(32 * matcher.num_words) if mask[token // 32] >> (token % 32) & 1}


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str | bytes) -> bool:
    """Whether ``text`` may be generated, byte by byte, and be the end."""
    matcher = compiler.matcher(grammar)
    for byte in text.encode() if isinstance(text, str) else text:
        if matcher._matcher.validate_tokens([byte]) == 0:
            return False
        matcher.advance(byte)
    return matcher.failure is None and (matcher.is_finished or END in allowed(matcher))


def of(**fields) -> Grammar:
    found = grammar_of("x", fields)
    assert found is not None
    return found


@settings(max_examples=examples(120))
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9), min_size=1))
def test_any_texts_can_be_chosen_from(compiler, texts):
    grammar = of(choice=texts)
    for text in texts:
        assert accepts(compiler, grammar, text), text
    assert not accepts(compiler, grammar, max(texts, key=len) + "~")


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"regex": "^a+$"}, ["a", "aaa"], ["", "b"]),
        ({"json": {"type": "boolean"}}, ["true"], ["1", "true true"]),
        ({"json": True}, ["3", '{"a": [null]}'], ["x"]),
        ({"json": '{"type": "null"}'}, ["null"], ["nul"]),
        ({"json_object": True}, ["{}", '{"a":\n1}'], ["[]", "3"]),
        ({"json": {"type": "object"}}, ['{ "a" : 1 }', "{" + " " * 20 + "}"], ["{" + " " * 21 + "}"]),
        ({"json": {"type": "object"}, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', "{ }"]),
        ({"json": {"type": "object"}, "whitespace_pattern": "_"}, ['{_"a":1}'], ['{ "a":1}']),
        (
            {"json": {"type": "object", "properties": {"a": {}}}, "disable_additional_properties": True},
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
        ({"json": {"properties": {"x-guidance": {"const": 1}}}}, ['{"x-guidance": 1}'], ['{"x-guidance": 2}']),
        ({"grammar": 'root ::= "a" [0-9]'}, ["a3"], ["a"]),
        ({"grammar": 'start: "a" DIGIT\nDIGIT: /[0-9]/'}, ["a3"], ["a"]),
    ],
)
def test_grammars_accept_and_reject_the_expected_texts(compiler, fields, yes, no):
    grammar = of(**fields)
    assert [text for text in yes if not accepts(compiler, grammar, text)] == []
    assert [text for text in no if accepts(compiler, grammar, text)] == []


TAGS = {
    "structures": [
        {"begin": "<call>f(", "schema": {"type": "integer"}, "end": ")"},
        {"begin": "<call>g(", "schema": {"type": "boolean"}, "end": ")"},
    ],
    "triggers": ["<call>"],
}


def tag(begin: str, content: dict, end: str = "") -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
ANY = {"type": "any_text"}
CONST = {"type": "const_string", "value": "x"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<b>", BOOLEAN)]}


@pytest.mark.parametrize(
    ("tags", "yes", "no"),
    [
        (TAGS, ["free text", "x<call>f(3)y<call>g(true)", "<cal"], ["<call>h(3)", "<call>f(true)", "<call>f(3"]),
        ({"format": {"type": "const_string", "value": 'a"/\n'}}, ['a"/\n'], ["a"]),
        ({"format": {"type": "regex", "pattern": "a/[bc]"}}, ["a/b"], ["a/"]),
        ({"format": {"type": "grammar", "grammar": 'root ::= "a" | "b"'}}, ["b"], ["c"]),
        ({"format": {"type": "or", "elements": [BOOLEAN, CONST]}}, ["true", "x"], ["y"]),
        ({"format": {"type": "sequence", "elements": [BOOLEAN, BOOLEAN]}}, ["truefalse"], ["true"]),
        ({"format": tag("<a>", ANY, "</a>")}, ["<a></a>", "<a>x<b</a>"], ["<a>x", "x<a></a>"]),
        (
            {"format": {**TRIGGERED, "at_least_one": True}},
            ["<b>true", "<b>true text <b>false"],
            ["text", "text<b>true"],
        ),
        (
            {"format": {**TRIGGERED, "stop_after_first": True}},
            ["text", "text <b>true"],
            ["<b>true text"],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [tag("[", BOOLEAN, "]")], "separator": ";"}},
            ["", "[true]", "[true];[false]"],
            ["[true];", "[true][true]"],
        ),
    ],
)
def test_structural_tags(compiler, tags, yes, no):
    grammar = of(structural_tag=tags)
    assert [text for text in yes if not accepts(compiler, grammar, text)] == []
    assert [text for text in no if accepts(compiler, grammar, text)] == []


def test_a_trigger_may_be_a_special_token(compiler):
    tags = {"format": {"type": "triggered_tags", "triggers": ["<|tool|>"], "tags": [tag("<|tool|>", BOOLEAN)]}}
    matcher = compiler.matcher(of(structural_tag=tags))
    matcher.advance(ord("x"))
    assert SPECIAL[0] in allowed(matcher)
    matcher.advance(SPECIAL[0])
    assert allowed(matcher) <= {ord("t"), ord("f"), TOKENS.index(b"true")}


def test_tokens_that_are_no_text_are_never_allowed(compiler):
    matcher = compiler.matcher(of(regex="(.|\n)*"))
    found = allowed(matcher)
    assert found & set(range(len(TOKENS) + 70)) >= {TOKENS.index(b"ab"), TOKENS.index(b"<call>"), END}
    assert max(found) < len(TOKENS) and SPECIAL[0] not in found


def test_without_an_end_token_a_text_ends_when_nothing_can_follow():
    compiler = GrammarCompiler(Vocabulary(TOKENS[:-1], SPECIAL[:1]).resized(len(TOKENS) - 1, []))
    matcher = compiler.matcher(of(regex="ab?"))
    matcher.advance(ord("a"))
    assert not matcher.is_finished
    assert {token for token in allowed(matcher) if token < len(TOKENS) - 1} == {ord("b")}
    matcher.advance(ord("b"))
    assert matcher.is_finished


def test_a_vocabulary_is_cut_or_filled_to_the_width_of_the_logits():
    assert Vocabulary(TOKENS, SPECIAL).resized(256, [7]) == Vocabulary(SINGLE, [7], [7])
    assert len(Vocabulary(TOKENS, SPECIAL).resized(999, [END]).tokens) == 999


def test_copies_do_not_share_their_state(compiler):
    one, other = (compiler.matcher(of(regex="ab|cd")) for _ in range(2))
    one.advance(ord("a"))
    assert ord("c") in allowed(other) and ord("c") not in allowed(one)


def test_a_grammar_that_is_compiled_elsewhere_is_waited_for(compiler):
    grammar = of(regex="prepared [0-9]+")
    assert compiler.prepare(grammar).result(timeout=20) is compiler.compiled.get(grammar)
    assert compiler.prepare(grammar).done()
    assert compiler.prepare(of(json={"not": {}})).result(timeout=20) is None


@pytest.mark.parametrize(
    ("fields", "id", "param"),
    [
        ({"regex": "a", "json": {}}, "unsupported_parameter", "x.regex"),
        ({"regex": ""}, "value_out_of_range", "x.regex"),
        ({"regex": "a\0"}, "value_out_of_range", "x.regex"),
        ({"regex": "a" * (1 << 20) + "a"}, "value_out_of_range", "x.regex"),
        ({"regex": 3}, "invalid_type", "x.regex"),
        ({"json": [1]}, "invalid_type", "x.json"),
        ({"json": "[" * 100_000}, "invalid_type", "x.json"),
        ({"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, "value_out_of_range", "x.json"),
        ({"choice": []}, "value_out_of_range", "x.choice"),
        ({"choice": ["a"] * 5 + [1]}, "invalid_type", "x.choice"),
        ({"choice": [str(number) for number in range(8193)]}, "value_out_of_range", "x.choice"),
        ({"json_object": False}, "value_out_of_range", "x.json_object"),
        ({"regex": "a", "backend": "magic"}, "value_out_of_range", "x.backend"),
        ({"regex": "a", "disable_any_whitespace": "yes"}, "invalid_type", "x.disable_any_whitespace"),
        ({"json": {}, "whitespace_pattern": 3}, "invalid_type", "x.whitespace_pattern"),
        ({"structural_tag": "{"}, "invalid_type", "x.structural_tag"),
        ({"pattern": "a"}, "unknown_field", "x.pattern"),
    ],
)
def test_what_is_no_grammar_is_refused(fields, id, param):
    with pytest.raises(AiakqError) as caught:
        grammar_of("x", fields)
    assert (caught.value.id, caught.value.param) == (id, param)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"json": {"not": {"type": "integer"}}}, '"not"'),
        ({"json": {"not": {}}}, "allows no value"),
        ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, '"uniqueItems"'),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"$ref": "https://example.org/schema"}}, "https://example.org/schema"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"grammar": "start: absent"}, "absent"),
        ({"structural_tag": {"format": {"type": "qwen"}}}, "'qwen'"),
    ],
)
def test_what_cannot_be_enforced_is_named(compiler, fields, named):
    with pytest.raises(AiakqError) as caught:
        compiler.matcher(of(**fields), param="there")
    assert caught.value.id == "grammar_not_enforceable" and caught.value.param == "there"
    assert named in str(caught.value)
    failed = compiler.matcher_or_failed(of(**fields))
    assert failed.failure is not None and not allowed(failed) and not failed.is_finished


#: Schemas with one keyword each, a value that is valid and one that is not.
KEYWORDS = [
    ("type", {"type": "integer"}, 3, "3"),
    ("enum", {"enum": [1, "a"]}, "a", "b"),
    ("const", {"const": [1]}, [1], [2]),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, 6, 7),
    ("minimum", {"type": "integer", "minimum": 3}, 3, 2),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    ("maximum", {"type": "number", "maximum": 0.5}, 0.25, 0.75),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, 2, 3),
    ("minLength", {"type": "string", "minLength": 2}, "ab", "a"),
    ("maxLength", {"type": "string", "maxLength": 2}, "ab", "abc"),
    ("pattern", {"type": "string", "pattern": "^a+$"}, "aa", "b"),
    ("format", {"type": "string", "format": "date"}, "2024-02-03", "2024-13-03"),
    ("items", {"type": "array", "items": {"type": "null"}}, [None], [1]),
    ("prefixItems", {"type": "array", "prefixItems": [{"type": "null"}]}, [None, 1], [1]),
    ("additionalItems", {"items": [{"type": "null"}], "additionalItems": False}, [None], [None, 1]),
    ("minItems", {"type": "array", "minItems": 1}, [1], []),
    ("maxItems", {"type": "array", "maxItems": 1}, [1], [1, 2]),
    ("uniqueItems", {"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    ("contains", {"type": "array", "contains": {"const": 1}}, [1], [2]),
    ("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}, [1, 1], [1]),
    ("unevaluatedItems", {"prefixItems": [{}], "unevaluatedItems": False}, [1], [1, 2]),
    ("properties", {"type": "object", "properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
    ("required", {"type": "object", "required": ["a"]}, {"a": 1}, {"b": 1}),
    ("additionalProperties", {"type": "object", "additionalProperties": {"type": "null"}}, {"a": None}, {"a": 1}),
    ("patternProperties", {"type": "object", "patternProperties": {"^x": {"type": "null"}}}, {"x": None}, {"x": 1}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 1}}, {"a": 1}, {"ab": 1}),
    ("minProperties", {"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ("maxProperties", {"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {}, {"a": 1}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}, {}, {"a": 1}),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 2}]}, 2, 1),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 0.5, 1),
    ("not", {"not": {"type": "integer"}}, "a", 1),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 2}}, 2, 1),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, None, 1),
    ("$dynamicRef", {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, None, 1),
    ("$recursiveRef", {"properties": {"a": {"$recursiveRef": "#"}}, "type": "object"}, {"a": {}}, {"a": 1}),
]


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), KEYWORDS, ids=[name for name, *_ in KEYWORDS])
def test_a_keyword_is_enforced_or_refused_by_name(compiler, keyword, schema, valid, invalid):
    grammar = of(json=schema)
    try:
        compiler.matcher(grammar)
    except AiakqError as failure:
        assert keyword in str(failure)
    else:
        assert accepts(compiler, grammar, json.dumps(valid))
        assert not accepts(compiler, grammar, json.dumps(invalid))


def test_tokens_that_are_too_long_are_never_generated():
    """llguidance panics over them, as in vllm#21204; texts can be spelled without them."""
    long = len(SINGLE)
    tokens = [*SINGLE, b"x" * 4096, b"<end>"]
    compiler = GrammarCompiler(Vocabulary(tokens, [long + 1]).resized(len(tokens), [long + 1]))
    matcher = compiler.matcher(of(regex="x+"))
    assert allowed(matcher) == {ord("x")}


def test_a_tokenizer_that_the_library_panics_over_is_refused(monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*args, **kwargs):
        raise PanicException("assertion failed")

    monkeypatch.setattr("llguidance.LLTokenizer", panics)
    with pytest.raises(AiakqError, match="assertion failed"):
        GrammarCompiler(Vocabulary(TOKENS, SPECIAL).resized(len(TOKENS), [END]))


def test_both_names_at_once_are_refused():
    with pytest.raises(AiakqError, match="given too"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})


def test_a_request_carries_its_grammar_and_nothing_else_of_it():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "null"}), seed=3)
    spec = admit("r", [1], params, ModelLimits(9, 99, 99, grammars=GrammarDefaults(compact=True, closed=True)))
    assert spec.grammar == Grammar("json", '{"type": "null"}', "", True)
    assert spec.sampling == SamplingParams(seed=3) and params.structured_outputs is not None
    own = GrammarDefaults(compact=True).apply(of(json={}, whitespace_pattern=" "))
    assert own.whitespace == " " and GrammarDefaults(True).apply(of(regex="a")) == of(regex="a")


def test_the_defaults_of_an_engine_are_checked():
    assert GrammarDefaults.from_args({"backend": "xgrammar", "disable_any_whitespace": True}) == GrammarDefaults(True)
    for wrong in ({"backend": "magic"}, {"disable_any_whitespace": 3}, {"unknown": 1}, {"enable_in_reasoning": True}):
        with pytest.raises(AiakqError, match=re.escape("--structured-outputs-config")):
            GrammarDefaults.from_args(wrong)


@pytest.mark.parametrize(
    ("draft", "counts"),
    [("http://json-schema.org/draft-07/schema#", False), ("https://json-schema.org/draft/2020-12/schema", True)],
)
def test_keywords_next_to_a_reference_count_by_the_draft(compiler, draft, counts):
    number = {"$ref": "#/definitions/number", "maximum": 5}
    named = {"$ref": {"type": "integer", "maximum": 5}}
    schema = {
        "$schema": draft,
        "type": "object",
        "properties": {"a": number, "b": {"type": "object", "properties": named, "additionalProperties": False}},
        "additionalProperties": False,
        "definitions": {"number": {"type": "integer", "minimum": 3}},
    }
    grammar = of(json=schema)
    assert accepts(compiler, grammar, '{"a": 4}') and not accepts(compiler, grammar, '{"a": 1}')
    assert accepts(compiler, grammar, '{"a": 9}') is not counts
    assert accepts(compiler, grammar, '{"b": {"$ref": 4}}') and not accepts(compiler, grammar, '{"b": {"$ref": 9}}')


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-07/schema#", None])
def test_an_object_is_one_also_where_its_schema_is_a_reference(compiler, draft):
    schema = {
        "$ref": "#/definitions/any",
        "allOf": [{"required": ["b"]}],
        "definitions": {"any": {"properties": {"a": {"type": "integer"}}}},
    }
    schema |= {"$schema": draft} if draft else {}
    grammar = of(json=clean_schema(schema, only_objects=True)[0])
    assert accepts(compiler, grammar, '{"a": 1, "b": 2}') and not accepts(compiler, grammar, '{"a": "x", "b": 2}')
    assert accepts(compiler, grammar, '{"a": 1}') is (draft is not None)  # beside a reference nothing counts
    assert not accepts(compiler, grammar, "3")


def mask_of(matcher: GrammarMatcher) -> list[int]:
    bits = torch.empty(matcher.num_words, dtype=torch.int32)
    matcher.fill_mask(bits.data_ptr())
    return bits.tolist()


def test_a_matcher_after_a_draft_token_leaves_the_original_unchanged(compiler):
    grammar = of(grammar='start: "ab" "c"? | "ad"')
    matcher = compiler.matcher(grammar)
    before = mask_of(matcher)
    ahead = matcher.after(ord("a"))
    assert mask_of(ahead) == mask_of(compiler.matcher(grammar, [ord("a")]))
    assert mask_of(ahead.after(ord("b"))) == mask_of(compiler.matcher(grammar, [ord("a"), ord("b")]))
    for drafts in ("x", "ax", "ad", "abc"):  # forbidden, or nothing follows
        behind = matcher
        for draft in drafts:
            behind = behind.after(ord(draft))
        assert not any(mask_of(behind)) and not any(mask_of(behind.after(ord("a"))))
    assert mask_of(matcher) == before and matcher.failure is None


def test_a_draft_token_on_which_a_grammar_explodes_fails_alone(compiler):
    matcher = compiler.matcher(of(grammar='start: "x" | e\ne: e e | /[a-b]/'))
    ahead = matcher
    while ahead.failure is None:
        mask_of(ahead)
        ahead = ahead.after(ord("a"))
    assert "items" in ahead.failure
    assert matcher.failure is None and any(mask_of(matcher))
