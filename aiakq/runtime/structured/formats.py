"""Builders of ``format`` objects, from which structural tags are composed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.structured.structural_tags import format_of_tags

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}


def const(text: str) -> Format:
    """Return the format of a constant text."""
    return {"type": "const_string", "value": text}


def any_text(excludes: Iterable[str] = (), not_beginning: str = "") -> Format:
    """Text without any of ``excludes``, and without a prefix that matches the pattern ``not_beginning``."""
    return ANY_TEXT | {"excludes": list(excludes)} | ({"not_beginning": not_beginning} if not_beginning else {})


def regex(pattern: str, excludes: Iterable[str] = ()) -> Format:
    """Text that fully matches ``pattern`` and contains none of ``excludes``."""
    return {"type": "regex", "pattern": pattern, "excludes": list(excludes)}


def schema(value: object) -> Format:
    """JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": value}


def sequence(*parts: Format) -> Format:
    """All parts in order."""
    return {"type": "sequence", "elements": list(parts)}


def either(*parts: Format) -> Format:
    """One of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def tag(begin: str, content: Format, end: str = "") -> Format:
    """``content`` between two delimiters."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def after_thought(
    answer: Format,
    starts: Sequence[str],
    ends: Sequence[str],
    *,
    is_open: bool,
    may_end: bool,
    may_end_with_call: bool = False,
) -> Format:
    """``answer``, before which a thought may come: any text between marks.

    is_open            whether the text begins within a thought.
    may_end            whether the text may end within a thought.
    may_end_with_call  whether it may if it ends with a call: ``answer``, or the first of its alternatives.
    """
    marks = {"starts": list(starts), "ends": list(ends), "may_end_with_call": may_end_with_call}
    return {"type": "after_thought", "answer": answer, "is_open": is_open, "may_end": may_end, **marks}


def text_before(calls: Format) -> Format:
    """Any text that ends with one of the tags of ``calls``, and white space."""
    return {"type": "text_before", "tags": [_spelled_freely(each) for each in calls["tags"]]}


#: The beginning of a call in JSON.
_JSON_CALL = re.compile(r'\{("type": "function", )?"name": "([\w.\-]+)", "(?:arguments|parameters)": ')
_S = r"[ \t\r\n]*"


def _spelled_freely(part: Format) -> Format:
    """``part`` with any white space in calls in JSON, and either key of their arguments, as parsers read them."""
    if part["type"] in ("tag", "tags_with_separator"):
        tags = {"tags": [_spelled_freely(each) for each in part["tags"]]} if "tags" in part else {}
        return part | tags | ({"content": _spelled_freely(part["content"])} if "content" in part else {})
    if part["type"] == "or":
        return part | {"elements": [_spelled_freely(each) for each in part["elements"]]}
    if part["type"] != "sequence":
        return part
    elements: list[Format] = []
    for each in part["elements"]:
        match = _JSON_CALL.fullmatch(each["value"]) if each["type"] == "const_string" else None
        if match:
            function = rf'"type"{_S}:{_S}"function"{_S},{_S}' if match[1] else ""
            name = rf'"name"{_S}:{_S}"{re.escape(match[2])}"'
            key = rf'{_S},{_S}"(arguments|parameters)"{_S}:{_S}'
            elements += [const("{"), regex(_S + function + name + key)]
        elif each == const("}"):
            elements.append(regex(rf"{_S}\}}"))
        else:
            elements.append(_spelled_freely(each))
    return part | {"elements": elements}


def some_tags(tags: Sequence[Format], separator: str, *, only_one: bool) -> Format:
    """One or more of ``tags``, in any order; exactly one if ``only_one``."""
    format = {"type": "tags_with_separator", "tags": list(tags), "separator": separator, "at_least_one": True}
    return format | {"stop_after_first": only_one}


def any_tags(tags: Sequence[Format]) -> Format:
    """Any number of ``tags``, in any order."""
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ""}


def text_with_tags(
    tags: Sequence[Format], triggers: Sequence[str], *, only_one: bool, text: Format = ANY_TEXT
) -> Format:
    """Text with any number of ``tags``, at most one if ``only_one``. A tag is required after each of ``triggers``.

    text  format of the text between tags; any text may contain other special tokens.
    """
    format = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), "text": text}
    return format | {"any_special_tokens": text == ANY_TEXT, "stop_after_first": only_one}


def with_thoughts(part: Format, starts: Sequence[str], ends: Sequence[str]) -> Format:
    """``part``, but in text with tags thoughts may open between these marks, in which nothing is enforced."""
    if part["type"] == "triggered_tags":
        return part | {"thoughts": {"starts": list(starts), "ends": list(ends)}}
    if part["type"] == "or":
        return part | {"elements": [with_thoughts(one, starts, ends) for one in part["elements"]]}
    return part


def format_of(grammar: Grammar) -> Format:
    """``grammar`` as a format object. Raises ``grammar_not_enforceable``."""
    if grammar.kind == "json":
        return schema(json.loads(grammar.text))
    if grammar.kind == "regex":
        return regex(grammar.text)
    if grammar.kind == "choice":
        return either(*map(const, json.loads(grammar.text)))
    if grammar.kind == "grammar":
        return {"type": "grammar", "grammar": grammar.text}
    part: Format = format_of_tags(json.loads(grammar.text))
    return part


def tag_grammar_of(part: Format, like: Grammar | None = None) -> Grammar:
    """The grammar of ``part``, with the JSON options of ``like``."""
    like = like or Grammar("structural_tag", "")
    return msgspec.structs.replace(like, kind="structural_tag", text=json.dumps({"format": part}, ensure_ascii=False))
