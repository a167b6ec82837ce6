"""Grammar: the format that the output of a request has to match, and the parameters that set it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.unicode_text import has_surrogates, well_formed

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

#: Maximum characters of a schema, a grammar or a pattern, and maximum nesting depth of a schema.
MAX_CHARS, MAX_DEPTH = 1 << 20, 64
#: Maximum strings of a choice, and maximum characters of all together.
MAX_CHOICES, MAX_CHOICE_CHARS = 8192, 1 << 18
#: Default white space between JSON tokens. Bounded: some models generate white space forever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
#: vLLM's names of backends, accepted without effect: the backend is always llguidance.
BACKENDS = ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar")


class Grammar(msgspec.Struct, frozen=True, eq=False):
    """The format that an output has to match. ``num_bytes`` and ``client`` do not count in comparisons.

    text        a JSON schema, a regular expression, a JSON list of strings, a grammar (Lark or GBNF), structural tags.
    whitespace  pattern of white space between JSON tokens; empty: none is allowed; None: WHITESPACE.
    closed      objects have only the properties that the schema names.
    num_bytes   memory that it took when it was compiled; 0: it was not measured.
    client      client for which it is compiled.
    """

    kind: Kind
    text: str
    whitespace: str | None = None
    closed: bool = False
    num_bytes: int = 0
    client: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str, str | None, bool]:
        return self.kind, self.text, self.whitespace, self.closed


@dataclass
class StructuredOutputsParams:
    """The format of the output, with vLLM's names. Exactly one of the first six fields is set."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


@dataclass
class GuidedDecodingParams:
    """``StructuredOutputsParams`` under the name and with the fields it had in vLLM 0.7."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class GrammarDefaults:
    """Defaults of requests: --structured-outputs-config.

    compact  JSON without white space.
    closed   see ``Grammar``.
    """

    compact: bool = False
    closed: bool = False

    @classmethod
    def from_args(cls, args: Mapping[str, object]) -> GrammarDefaults:
        """Create them from --structured-outputs-config. Raises ``bad_option``."""
        option, names = "--structured-outputs-config", ("disable_any_whitespace", "disable_additional_properties")
        without_effect = {"backend": BACKENDS, "disable_fallback": (True, False)}
        without_effect |= {"reasoning_parser": ("",), "enable_in_reasoning": (False,)}
        for name, value in args.items():
            allowed = (True, False) if name in names else without_effect.get(name, ())
            if value is not None and value not in allowed:
                expected = f"one of {', '.join(map(str, allowed))}" if allowed else f"one of {', '.join(names)}"
                raise error("bad_option", option=option, value=f"{name}: {value}", expected=expected, hint="")
        return cls(bool(args.get(names[0])), bool(args.get(names[1])))

    def apply(self, grammar: Grammar) -> Grammar:
        """``grammar`` with the defaults for what its request does not set."""
        if grammar.kind not in ("json", "structural_tag"):
            return grammar
        whitespace = "" if self.compact and grammar.whitespace is None else grammar.whitespace
        return msgspec.structs.replace(grammar, whitespace=whitespace, closed=grammar.closed or self.closed)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def grammar_of(param: str, grammar: object) -> Grammar | None:
    """Convert ``grammar``, an object of one of the two classes above or a mapping with their fields, to a ``Grammar``.

    Returns None if no field is set.

    param  name of the field in the request, for error messages.

    Raises invalid_type, value_out_of_range, unknown_field, unsupported_parameter.
    """
    if isinstance(grammar, Grammar):
        return grammar
    values: Mapping[str, Any] = grammar if isinstance(grammar, Mapping) else getattr(grammar, "__dict__", None) or {}
    if grammar is not None and not isinstance(grammar, (Mapping, StructuredOutputsParams, GuidedDecodingParams)):
        raise error("invalid_type", param=param, reason="an object is expected")
    values = {name: value for name, value in values.items() if value is not None}
    known = {*_KINDS, *_FLAGS, "backend", "whitespace_pattern"}
    for name in values:
        if name not in known:
            raise error("unknown_field", param=f"{param}.{name!s:.64}", hint=f"Known: {', '.join(sorted(known))}.")
    for name in _FLAGS:
        _check_type(f"{param}.{name}", values.get(name, False), bool, "true or false is expected")
    if values.get("backend", "auto").partition(":")[0] not in BACKENDS:
        raise error(
            "value_out_of_range", param=f"{param}.backend", value=values["backend"], allowed=", ".join(BACKENDS)
        )
    kinds = [name for name in _KINDS if name in values]
    if values.get("json_object") is False:
        raise error("value_out_of_range", param=f"{param}.json_object", value=False, allowed="true")
    if len(kinds) > 1:
        raise error("unsupported_parameter", param=f"{param}.{kinds[1]}", reason=f"{kinds[0]} is given too")
    if not kinds:
        return None
    whitespace = values.get("whitespace_pattern")
    if whitespace is not None:
        _check_type(f"{param}.whitespace_pattern", whitespace, str, "a regular expression is expected")
    if values.get("disable_any_whitespace"):
        whitespace = ""
    closed = bool(values.get("disable_additional_properties"))
    kind = kinds[0]
    return new_grammar(kind, f"{param}.{kind}", values[kind], whitespace, closed)


def new_grammar(kind: str, param: str, value: object, whitespace: str | None = None, closed: bool = False) -> Grammar:
    """The grammar for ``value`` of the field ``kind`` of ``StructuredOutputsParams``. Raises as ``grammar_of``."""
    return _MAKERS[kind](param, value, whitespace, closed)


def json_grammar(param: str, schema: object, whitespace: str | None = None, closed: bool = False) -> Grammar:
    """JSON that matches ``schema``: an object, a boolean, or the text of one, or a pydantic model. Raises as
    ``grammar_of``.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        schema = parse_json(param, schema)
    if not isinstance(schema, (dict, bool)):
        raise error("invalid_type", param=param, reason="a JSON schema is expected, as an object or a string of JSON")
    _check_depth(param, schema)
    return Grammar("json", _checked_text(param, json_text(param, schema)), whitespace, closed)


def _regex_grammar(param: str, pattern: object, whitespace: str | None, closed: bool) -> Grammar:
    return Grammar("regex", _checked_text(param, pattern))


def _choice_grammar(param: str, texts: object, whitespace: str | None, closed: bool) -> Grammar:
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise error("invalid_type", param=param, reason="a list of strings is expected")
    distinct = list(dict.fromkeys(map(well_formed, texts)))
    if not distinct or len(distinct) > MAX_CHOICES or sum(map(len, distinct)) > MAX_CHOICE_CHARS:
        allowed = f"1 to {MAX_CHOICES} strings with at most {MAX_CHOICE_CHARS} characters in total"
        raise error("value_out_of_range", param=param, value=f"{len(distinct)} strings", allowed=allowed)
    return Grammar("choice", json.dumps(distinct, ensure_ascii=False))


def _lark_grammar(param: str, text: object, whitespace: str | None, closed: bool) -> Grammar:
    return Grammar("grammar", _checked_text(param, text))


def _json_object_grammar(param: str, value: object, whitespace: str | None, closed: bool) -> Grammar:
    _check_type(param, value, bool, "true is expected")
    return Grammar("json", '{"type": "object"}', whitespace)


def _tag_grammar(param: str, tags: object, whitespace: str | None, closed: bool) -> Grammar:
    if isinstance(tags, str):
        tags = parse_json(param, tags)
    _check_type(param, tags, dict, "an object is expected, or a string of JSON")
    _check_depth(param, tags)
    return Grammar("structural_tag", _checked_text(param, json_text(param, tags)), whitespace, closed)


_MAKERS: dict[str, Callable[[str, object, str | None, bool], Grammar]] = {
    "json": json_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _lark_grammar,
    "json_object": _json_object_grammar,
    "structural_tag": _tag_grammar,
}


def parse_json(param: str, text: str) -> object:
    """``text`` as JSON, in which lone surrogates may remain. Raises ``invalid_type``."""
    try:
        return json.loads(_checked_text(param, text))
    except (ValueError, RecursionError) as failure:
        raise error("invalid_type", param=param, reason=f"it is not valid JSON: {failure}") from None


def _check_type(param: str, value: object, expected: type, reason: str) -> None:
    if not isinstance(value, expected):
        raise error("invalid_type", param=param, reason=reason)


def _checked_text(param: str, text: Any) -> str:
    _check_type(param, text, str, "a string is expected")
    if not text or len(text) > MAX_CHARS or "\0" in text:
        allowed = f"a string of 1 to {MAX_CHARS} characters without NUL"
        raise error("value_out_of_range", param=param, value=well_formed(text[:32]), allowed=allowed)
    return well_formed(text)


def json_text(param: str, value: object) -> str:
    """Return ``value`` as JSON, with U+FFFD for lone surrogates. Raises ``invalid_type`` for one in a name."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as failure:
        raise error("invalid_type", param=param, reason=f"it cannot be written as JSON: {failure}"[:200]) from None
    if has_surrogates(text) and not _has_unicode_names(value):
        reason = "a name in the schema has half of a character (a lone surrogate)"
        raise error("invalid_type", param=param, reason=reason)
    return well_formed(text)


def _has_unicode_names(value: object) -> bool:
    """Whether the names in all objects in ``value``, and those that are required, can be encoded."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            names = [*each, *(each["required"] if isinstance(each.get("required"), list) else ())]
            if any(isinstance(name, str) and has_surrogates(name) for name in names):
                return False
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return True


def _check_depth(param: str, schema: object) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            allowed = f"at most {MAX_DEPTH} levels of nesting"
            raise error("value_out_of_range", param=param, value="a deeper value", allowed=allowed)
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]


def not_enforceable(param: str, reason: str) -> AiakqError:
    """The error for a grammar that cannot be enforced for ``reason``, one line."""
    return error("grammar_not_enforceable", param=param, reason=reason or "no reason given")
