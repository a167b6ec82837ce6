"""TemplateFacts: what a chat template does with the parts of a conversation, seen by rendering probes.

A probe is a conversation with a word that no template contains. Whether the word is in the rendered text tells whether
the template has a place for that part. The source of a template is never searched: names may be in comments, in
branches that are never taken, or in macros.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from aiakq.runtime.text.message_forms import CALL_FORMS, CallForm, message_forms

#: Forms of a message's content: a string, a list of parts with type and text, or a list of exactly one part.
Form = Literal["string", "openai", "part"]
FORMS: tuple[Form, ...] = ("string", "openai", "part")
#: Roles whose messages are probed.
ROLES = ("user", "assistant", "system", "developer", "tool")
Messages = list[dict[str, Any]]
#: Renders a conversation with the given arguments; may raise anything.
Render = Callable[..., str]

#: Lowercase letters only, because templates may strip, split, quote or change the case of a text.
_WORD, _OTHER = "qzprobewordqz", "qzotherwordqz"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": _WORD, "description": _WORD, "parameters": _PARAMETERS}}
_INSTRUCTING = ("system", "developer")
#: For templates that show calls only beside tools.
_FILLER_TOOL = {"type": "function", "function": {"name": "f", "description": "c", "parameters": _PARAMETERS}}
_CALLED = {"name": _WORD, "arguments": json.dumps({_OTHER: "1"})}
_ASKING = {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": _CALLED}]}
#: Arguments that some templates need, tried one after another.
_EXTRAS: tuple[dict[str, Any], ...] = ({}, {"documents": [{"title": "d", "text": "e"}]}, {"tools": []})
#: The order of preference among forms of calls that a template shows equally well; transformers' form first.
_PREFERENCE = sorted(CALL_FORMS, key=lambda form: (not form.as_object, form.content != "absent"))
#: One document with the names of fields that published templates read.
_DOCUMENT = {"title": _WORD, "text": _WORD, "content": _WORD, "contents": _WORD, "doc_id": 1, "id": 1}
#: Beginnings of a list of parts that a template printed as a whole.
_PRINTED_LIST = ("[{'type'", '[{"type"', "[{&#39;type", "[{&#34;type")
#: Signs of arguments in a form that the template does not expect: printed as a Python object, or quoted twice.
_WRONG_ARGUMENTS = (f"'{_OTHER}'", f'\\"{_OTHER}')


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a chat template does.

    forms             role -> forms of content whose text it shows. Empty: it leaves the text out. Absent: unknown,
                      because it raised for every probe.
    takes_tools       whether it shows ``tools``. Like the others: true if that is unknown.
    takes_calls       whether it shows the calls of past messages.
    takes_documents   whether it shows ``documents``.
    shows_names       whether it shows the field ``name`` of users' messages.
    call_form         the form of messages with calls in which they are shown without flaws, such as "None".
    """

    forms: dict[str, list[Form]] = {}
    takes_tools: bool = True
    takes_calls: bool = True
    takes_documents: bool = True
    shows_names: bool = True
    call_form: CallForm = CALL_FORMS[0]

    @property
    def loses_user_text(self) -> bool:
        return self.forms.get("user") == []

    def lacks(self, role: str) -> bool:
        """Whether messages of ``role`` are left out or refused, whatever the form of their content."""
        return not self.forms.get(role)


def find_facts(render: Render, with_tools: bool = False) -> TemplateFacts:
    """Find out what a template does. ``render(messages, **arguments)`` renders it.

    with_tools  whether to probe conversations with tools, in which some templates show other parts.
    """
    probe = _Probe(render, {"tools": [_FILLER_TOOL]} if with_tools else {})
    forms: dict[str, list[Form]] = {}
    for role in ROLES:
        shown = [probe.shows_text(role, form, forms) for form in FORMS]
        if any(each is not None for each in shown):
            forms[role] = [form for form, is_shown in zip(FORMS, shown, strict=True) if is_shown]
            if {"openai", "part"} <= set(forms[role]):
                forms[role].remove("part")
    takes_calls, call_form = probe.calls(forms)
    return TemplateFacts(
        forms=forms,
        takes_tools=probe.shows_argument(forms, tools=[_TOOL]),
        takes_calls=takes_calls,
        takes_documents=probe.shows_argument(forms, documents=[_DOCUMENT]),
        shows_names=probe.shows_names(forms),
        call_form=call_form,
    )


class _Probe:
    """Renders probes."""

    def __init__(self, render: Render, arguments: dict[str, Any]) -> None:
        """``arguments``: those of every probe."""
        self._render = render
        self._arguments = arguments

    def shows_text(self, role: str, form: Form, known: dict[str, list[Form]]) -> bool | None:
        """Whether content of this form is shown; None if the template raises for every conversation with it."""
        raised = True
        # Some templates show results only beside tools.
        arguments: tuple[dict[str, Any], ...] = ({}, {"tools": [_FILLER_TOOL]}) if role == "tool" else ({},)
        for conversation, given in itertools.product(_conversations(role, form, known), arguments):
            text = self._text(conversation, **given)
            if text is None:
                continue
            raised = False
            # A template that shows only the first message would lose the user's text after a system message.
            is_shown = _WORD in text and (role not in _INSTRUCTING or _OTHER in text)
            if is_shown and not (form != "string" and any(mark in text for mark in _PRINTED_LIST)):
                return True
        return None if raised else False

    def shows_argument(self, known: dict[str, list[Form]], **arguments: Any) -> bool:
        """Whether an argument of the template is shown, in any conversation; true if it raises for all."""
        raised = True
        for conversation in _plain_conversations(known):
            text = self._text(conversation, **arguments)
            if text is not None:
                raised = False
                if _WORD in text:
                    return True
        return raised

    def shows_names(self, known: dict[str, list[Form]]) -> bool:
        """Whether the name of a user is shown, in any conversation; true if the template raises for all."""
        asked = [[*each[:-1], {**each[-1], "name": _WORD}] for each in _plain_conversations(known)]
        texts = [text for text in map(self._text, asked) if text is not None]
        return not texts or any(_WORD in text for text in texts)

    def calls(self, known: dict[str, list[Form]]) -> tuple[bool, CallForm]:
        """Return whether calls are shown, true if the template raises for all; and the form in which they look best."""
        result = {"role": "tool", "tool_call_id": "call00001", "name": "f"}
        result["content"] = _content("1", _first(known, "tool"))
        raised = True
        found: list[tuple[int, CallForm]] = []
        for form in _PREFERENCE:
            for asked, arguments in itertools.product(_plain_conversations(known), ({}, {"tools": [_FILLER_TOOL]})):
                for rest in ([result], [], [result, asked[-1]]):
                    [conversation] = itertools.islice(message_forms([*asked, _ASKING, *rest], form), 1)
                    text = self._text(conversation, **arguments)
                    raised = raised and text is None
                    if text is not None and (_WORD in text or _OTHER in text):
                        found.append((_flaws(text), form))
            if found and found[-1][0] == 0:
                break
        best = min(found, key=lambda each: each[0], default=(0, CALL_FORMS[0]))[1]
        return bool(found) or raised, best

    def _text(self, conversation: Messages, **arguments: Any) -> str | None:
        """Return the rendered text in lower case, or None if the template raises with and without documents."""
        for extra in _EXTRAS:
            try:
                return self._render(
                    conversation, add_generation_prompt=False, **(extra | self._arguments | arguments)
                ).lower()
            except (MemoryError, TimeoutError):
                raise
            except Exception:  # templates raise anything
                continue
        return None


def _flaws(text: str) -> int:
    """Return how much of a rendered call looks wrong: a content of "None", arguments in another form, or no name."""
    missing = [word for word in (_WORD, _OTHER) if word not in text]
    return text.count("none") + sum(map(text.count, _WRONG_ARGUMENTS)) + len(missing)


def _first(known: dict[str, list[Form]], role: str) -> Form:
    return next(iter(known.get(role) or ()), "string")


def _content(text: str, form: Form) -> Any:
    if form == "string":
        return text
    part = {"type": "text", "text": text}
    return [part] if form == "part" else [{"type": "text", "text": "a"}, part]


def _plain_conversations(known: dict[str, list[Form]]) -> Iterator[Messages]:
    """Yield conversations that end with a user message and contain no word."""
    user = {"role": "user", "content": _content("a", _first(known, "user"))}
    system = {"role": "system", "content": _content("b", _first(known, "system"))}
    answer = {"role": "assistant", "content": _content("c", _first(known, "assistant"))}
    yield [user]
    yield [system, user]
    yield [user, answer, user]


def _conversations(role: str, form: Form, known: dict[str, list[Form]]) -> Iterator[Messages]:
    """Yield conversations with a message of ``role`` that contains the word."""
    message: dict[str, Any] = {"role": role, "content": _content(_WORD, form)}

    def filler(name: str, fill: Form) -> dict[str, Any]:
        text = _OTHER if role in _INSTRUCTING and name == "user" else "a"
        return {"role": name, "content": _content(text, (known[name] or [fill])[0] if name in known else fill)}

    for fill in (form, *(each for each in FORMS if each != form)):
        user, answer, system = (filler(name, fill) for name in ("user", "assistant", "system"))
        if role == "user":
            yield from ([message], [system, message], [user, answer, message], [message, answer, user])
        elif role == "assistant":
            yield from ([user, message, user], [user, message], [system, user, message, user])
        elif role in _INSTRUCTING:
            yield from ([message, user], [message, user, answer, user])
        else:
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
            message |= {"tool_call_id": "call00001", "name": "f"}
            for content in (None, ""):
                asked = {"role": "assistant", "content": content, "tool_calls": [call]}
                yield from ([user, asked, message], [user, asked, message, answer, user], [user, asked, message, user])
            yield [user, answer, message]
