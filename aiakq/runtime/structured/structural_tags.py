"""Structural tags: text with tags whose contents are constrained, compiled to a grammar of llguidance.

Both forms of vLLM's ``structural_tag``: ``structures`` with ``triggers``, and a tree of ``format`` objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiakq.runtime.protocol.grammar import not_enforceable
from aiakq.runtime.structured.thoughts import BLANKS, ThoughtsInText, thought_rule

_ANY = r"(.|\n)*"
_TEXT = f"/{_ANY}/"
_PARAM = "structural_tag"
_CONTROL = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


def tag_grammar(
    tags: Mapping[str, object],
    schema_of: Callable[[object], object],
    special_ids: Mapping[str, int],
    end_ids: Collection[int] = (),
) -> str:
    """The grammar of ``tags``.

    schema_of    adds the request's options to a JSON schema.
    special_ids  special tokens by their text; in a tag, that text stands for the token.
    end_ids      end-of-sequence tokens.

    Raises ``grammar_not_enforceable``.
    """
    rules = _Rules(schema_of, special_ids, end_ids)
    return rules.whole(rules.of(format_of_tags(tags)))


def format_of_tags(tags: Mapping[str, object]) -> Any:
    """The ``format`` object of ``tags`` in either form. Raises ``grammar_not_enforceable``."""
    if "structures" not in tags:
        return tags.get("format")
    structures = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end", ""),
        }
        for one in _list(tags, "structures", dict)
    ]
    return {"type": "triggered_tags", "triggers": tags.get("triggers"), "tags": structures}


class _Rules:
    """Rules of a Lark grammar, and the other grammars that they refer to."""

    def __init__(
        self, schema_of: Callable[[object], object], special_ids: Mapping[str, int], end_ids: Collection[int]
    ) -> None:
        self._schema_of, self._special_ids, self._end_ids = schema_of, special_ids, frozenset(end_ids)
        names = sorted((re.escape(name) for name in special_ids if name), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})") if names else None  # None: they are spelled as text
        self._lines: list[str] = []
        # Parts and their rules, by identity of the part and whether special tokens are spelled as text.
        self._named: dict[tuple[int, bool], tuple[object, str]] = {}
        self._schemas: dict[str, str] = {}  # JSON schema -> its rule
        self._grammars: list[dict[str, object]] = []

    def whole(self, start: str) -> str:
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._grammars]})

    def of(self, part: Any) -> str:
        """The name of a rule for the ``format`` object ``part``."""
        key = (id(part), self._special is None)
        if key not in self._named:
            self._named[key] = part, self._of(part)
        return self._named[key][1]

    def _of(self, part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "const_string":
            value = _text(part, "value")
            return self._rule(self._mark(value) if value in self._special_ids else quoted(value))
        if kind == "json_schema":
            schema = {} if part.get("json_schema") is None else part["json_schema"]
            written = json.dumps(schema)
            if written not in self._schemas:
                self._schemas[written] = self._rule("%json " + json.dumps(self._schema_of(schema)))
            return self._schemas[written]
        if kind in ("regex", "any_text"):
            return self._rule(self._free(part))
        if kind == "grammar":
            return self._other(_text(part, "grammar"))
        if kind == "sequence":
            return self._rule(" ".join(map(self.of, _list(part, "elements", dict))))
        if kind == "or" and (texts := self._constants(part)):
            name, lines = f"rule_{len(self._lines)}", choice_rules(f"rule_{len(self._lines)}", texts)
            self._lines += lines
            return name
        if kind == "or":
            return self._rule(" | ".join(map(self.of, _list(part, "elements", dict))))
        if kind == "tag":
            return self._tag(part)
        if kind == "triggered_tags":
            return self.triggered(
                _list(part, "triggers", str),
                _list(part, "tags", dict),
                at_least_one=bool(part.get("at_least_one")),
                stops=bool(part.get("stop_after_first")),
                keeps_special=bool(part.get("any_special_tokens")),
                text=part.get("text", {"type": "any_text"}),
                not_first=part.get("not_beginning_with", []),
                thoughts=part.get("thoughts"),
            )
        if kind == "tags_with_separator":
            return self._separated(part)
        if kind == "text_before":
            return self._text_before(_list(part, "tags", dict))
        if kind == "after_thought":
            return thought_rule(self, part)
        raise not_enforceable(_PARAM, f"the format {str(kind)[:64]!r} is unknown")

    def _constants(self, part: Mapping[str, object]) -> list[str]:
        """The texts of which ``part`` is one, without special tokens; none if it is something else."""
        elements = _list(part, "elements", dict)
        texts = [each["value"] for each in elements if each.get("type") == "const_string" and "value" in each]
        is_plain = len(texts) == len(elements) and all(
            isinstance(text, str) and self._parts(text) in ([], [quoted(text)]) for text in texts
        )
        return texts if is_plain else []

    def triggered(
        self,
        triggers: list[str],
        tags: list[dict[str, object]],
        *,
        at_least_one: bool,
        stops: bool,
        keeps_special: bool = False,
        text: Any,
        not_first: list[str],
        may_lack: bool = True,
        thoughts: Mapping[str, Any] | None = None,
    ) -> str:
        """Text with ``tags``, each of which begins with one of ``triggers``; after a trigger, a tag is required.

        at_least_one   the text starts with a tag.
        stops          the text ends after the first tag.
        keeps_special  special tokens are allowed between tags.
        text           format of the text between tags.
        not_first      what the text before the first tag does not begin with, apart from white space.
        may_lack       if ``stops``, whether there may be no tag.
        thoughts       marks of thoughts that may open in the text; see ``ThoughtsInText``.
        """
        between, text = text, self._free(text)
        first_text = self._free(between | {"not_beginning_with": not_first}) if not_first else ""
        in_text, in_first = [], []
        opening = list(thoughts["starts"]) if thoughts else []
        begins = {self._parts(one)[0] for one in (*triggers, *opening) if one}
        others = self._special_ids.values() if keeps_special else ()
        other_ids = {id for id in others if f"<[{id}]>" not in begins} - self._end_ids
        prefix, tail, head, first_tails = self._parts_of_text(between, text, first_text, other_ids, not_first, thoughts)

        def add(trigger: str, rest: str) -> None:
            in_text.append(self._rule(f"{prefix} {self._until(text, trigger)} {rest}"))
            if first_text:
                in_first.append(self._rule(f"{self._until(first_text, trigger)} {rest}"))
                in_first.extend([self._rule(f"{head} {in_text[-1]}")] if head else [])

        for tag in tags:
            begin = _text(tag, "begin")
            trigger = max((one for one in triggers if one and begin.startswith(one)), key=len, default=None)
            if trigger is None:
                raise not_enforceable(_PARAM, f"no trigger begins the tag {begin[:64]!r}")
            rest = begin[len(trigger) :]
            add(trigger, self._rule(self._rest(tag, rest)))
            if self._parts(trigger) != [quoted(trigger)]:  # a model may spell out a special token as text
                special, self._special = self._special, None
                add(trigger, self._rule(self._rest(tag, rest)))
                self._special = special
        later = self._rule(" | ".join(in_text))
        if first_text and not at_least_one:
            only = " | ".join([*first_tails, *([f"{head} {prefix} {tail}"] if head else [])])
            more = "" if stops else f"({later})* {prefix} {tail}"
            return self._rule(f"({' | '.join(in_first)}) {more} | {only}")
        first = self._rule(" | ".join(map(self._tag, tags))) if at_least_one else ""
        if stops:
            return self._rule(first or (f"{later} | {prefix} {tail}" if may_lack else later))
        return self._rule(f"{first} ({later})* {prefix} {tail}")

    def _parts_of_text(
        self,
        text: Any,
        terminal: str,
        first_text: str,
        special_ids: Collection[int],
        not_first: list[str],
        thoughts: Mapping[str, object] | None,
    ) -> tuple[str, str, str, list[str]]:
        """Rules for the text between tags; parameters as in ``triggered`` and ``_head``.

        Returns the text before what comes next, which are special tokens and thoughts; the text at the end; the text up
        to the first special token or the end of the first thought, if the first text has a rule of its own; and, then,
        the ways in which the whole text may be without both.
        """
        inner = [self._rule(f"{terminal} {_one_of(special_ids)}")] if special_ids else []
        heads = [self._head(text, first_text, special_ids, not_first)] if first_text and special_ids else []
        tail, first_tails = terminal, [first_text]
        if thoughts:
            in_text = ThoughtsInText(self, terminal, thoughts)
            inner.append(in_text.closed)
            tail = self._rule(f"{terminal} | {in_text.unclosed}")
            if first_text:
                filled = self._free(text | {"not_beginning_with": not_first, "is_blank": False})
                closed, unclosed = in_text.after(filled)
                heads.append(closed)
                first_tails.append(unclosed)
        prefix = f"({' | '.join(inner)})*" if inner else ""
        return prefix, tail, self._rule(" | ".join(heads)) if heads else "", first_tails

    def _head(self, text: Any, first_text: str, special_ids: Collection[int], not_first: list[str]) -> str:
        """Text up to and including the first special token; parameters as in ``triggered``.

        first_text  terminal of ``text`` that begins with none of ``not_first``.
        """
        filled = self._free(text | {"not_beginning_with": not_first, "is_blank": False})
        allowed = set(special_ids) - {self._special_ids[mark] for mark in not_first if mark in self._special_ids}
        heads = [f"{filled} {_one_of(special_ids)}", *([f"{first_text} {_one_of(allowed)}"] if allowed else [])]
        return self._rule(" | ".join(heads))

    def _text_before(self, tags: list[dict[str, object]]) -> str:
        """Text that ends with one of ``tags``, and white space; special tokens are allowed in it."""
        begun = [_with_begin(tag) for tag in tags]
        begins = [_text(tag, "begin") for tag in begun]
        text = {"type": "any_text"}
        last = self.triggered(
            begins, begun, at_least_one=False, stops=True, keeps_special=True, text=text, not_first=[], may_lack=False
        )
        return self._rule(f"({last})* {last} {self._free(BLANKS)}")

    def _separated(self, part: Mapping[str, object]) -> str:
        tag = self._rule(" | ".join(map(self._tag, _list(part, "tags", dict))))
        many = tag if part.get("stop_after_first") else f"{tag} ({self._mark(_text(part, 'separator'))} {tag})*"
        return self._rule(many if part.get("at_least_one") else f"({many})?")

    def _tag(self, tag: Mapping[str, object]) -> str:
        return self._rule(f"{self._mark(_text(tag, 'begin'))} {self._rest(tag, '')}")

    def _rest(self, tag: Mapping[str, object], begin: str) -> str:
        """The part of a tag after its trigger: ``begin``, its content and its end."""
        content, end = tag.get("content"), _text(tag, "end")
        if isinstance(content, dict) and content.get("type") in ("any_text", "regex") and end:
            return f"{self._mark(begin)} {self._until(self._free(content), end)}"
        return f"{self._mark(begin)} {self.of(content)} {self._mark(end)}"

    def _until(self, text: str, mark: str) -> str:
        """Text up to and including ``mark``."""
        first, *more = self._parts(mark)
        if first.startswith("<["):  # a special token is never part of the text
            return f"{text} {self._mark(mark)}"
        return self._rule(" ".join([self._rule(f"{text} {first}", "[lazy]"), *more]))

    def until(self, text: str, mark: str) -> list[str]:
        """Text up to and including ``mark``, as special tokens, if it has any, and spelled as text."""
        ways = [self._until(text, mark)]
        if self._parts(mark) != [quoted(mark)]:
            special, self._special = self._special, None
            ways.append(self._until(text, mark))
            self._special = special
        return ways

    def _mark(self, text: str) -> str:
        """A rule of ``text``, in which special tokens are matched as tokens."""
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """The special tokens in ``text`` and the strings between them, in order."""
        ids = {} if self._special is None else self._special_ids
        parts = [text] if self._special is None else self._special.split(text)
        return [f"<[{ids[part]}]>" if part in ids else quoted(part) for part in parts if part]

    def spelled(self, text: str) -> str:
        """``text`` as a string literal, also if it is a special token."""
        return quoted(text)

    def special_except(self, marks: list[str]) -> str:
        """The special tokens, but not those that end the text or begin one of ``marks``; empty if there are none."""
        begins = {self._parts(mark)[0] for mark in marks}
        ids = [id for id in self._special_ids.values() if id not in self._end_ids and f"<[{id}]>" not in begins]
        return _one_of(ids) if ids else ""

    def _rule(self, body: str, options: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def _free(self, part: Any) -> str:
        """The name of a terminal: any text, or a regular expression."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("regex", "any_text"):
            raise not_enforceable(_PARAM, "text between tags has to be of the type 'any_text' or 'regex'")
        body = f"/{_escaped(_text(part, 'pattern'))}/" if kind == "regex" else _TEXT
        if part.get("excludes"):
            marks = "|".join(re.escape(one) for one in _list(part, "excludes", str))
            body += f" & ~/{_escaped(f'{_ANY}({marks}){_ANY}')}/"
        if part.get("not_beginning"):
            beginning = _text(part, "not_beginning")
            body += f" & ~/{_escaped(f'({beginning}){_ANY}')}/"
        if part.get("not_beginning_with"):
            marks = "|".join(re.escape(one) for one in _list(part, "not_beginning_with", str))
            beginning = rf"[ \n\r\t]*({marks}){_ANY}"
            body += f" & ~/{_escaped(beginning)}/"
        if part.get("is_blank") is False:
            body += r" & ~/[ \n\r\t]*/"
        return self._terminal(body)

    def _terminal(self, body: str) -> str:
        name = f"TEXT_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    #: For ``thoughts.py``.
    rule, free, parts = _rule, _free, _parts

    def _other(self, text: str) -> str:
        from llguidance.gbnf_to_lark import any_to_lark

        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": any_to_lark(text)})
        return self._rule(f"@{name}")


def _with_begin(tag: dict[str, object]) -> dict[str, object]:
    """``tag`` with the constant with which its content begins as its beginning, if it has none."""
    content = tag.get("content")
    if _text(tag, "begin") or not isinstance(content, dict) or content.get("type") != "sequence":
        return tag
    first, *rest = content["elements"]
    return tag | {"begin": _text(first, "value"), "content": {"type": "sequence", "elements": rest}}


def _one_of(ids: Iterable[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def choice_rules(name: str, texts: Collection[str]) -> list[str]:
    """The rule ``name`` of a Lark grammar for one of ``texts``, as one terminal, however many they are."""
    terminal = f"{name.upper()}_TEXT"
    spelled = " | ".join(quoted(text) for text in texts if text)
    if not spelled:
        return [f'{name}: ""']
    return [f"{name}: {terminal}{'?' if '' in texts else ''}", f"{terminal}: {spelled}"]


def quoted(text: str) -> str:
    """``text`` as a string literal of Lark, with control characters escaped."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _escaped(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, "")


def _text(part: Mapping[str, object], name: str) -> str:
    value = part.get(name, "" if name == "end" else None)
    if not isinstance(value, str):
        raise not_enforceable(_PARAM, f"{name} has to be a string")
    return value


def _list(part: Mapping[str, object], name: str, kind: type) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, kind) for one in value):
        raise not_enforceable(_PARAM, f"{name} has to be a non-empty list of {kind.__name__}")
    return value
