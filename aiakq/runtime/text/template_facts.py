"""TemplateFacts: what a chat template does with the parts of a conversation, seen by rendering probes.

A probe is a conversation with a word that no template contains. Whether the word is in the rendered text tells whether
the template has a place for that part. The source of a template is never searched: names may be in comments, in
branches that are never taken, or in macros.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from aiakq.errors import first_line
from aiakq.runtime.text.message_forms import CALL_FORMS, INSTRUCTING, CallForm, message_forms
from aiakq.runtime.text.turn_probes import FILLER_TOOL, TurnProbes

#: Forms of a message's content: a string, a list of parts with type and text, or a list of exactly one part.
Form = Literal["string", "openai", "part"]
FORMS: tuple[Form, ...] = ("string", "openai", "part")
#: Roles whose messages are probed.
ROLES = ("user", "assistant", "system", "developer", "tool")
#: How a conversation may begin: without instructions, or with those of a role; "empty": of the system, without a text.
Lead = Literal["none", "system", "developer", "empty"]
LEADS: tuple[Lead, ...] = ("none", "system", "developer", "empty")
Messages = list[dict[str, Any]]
#: Renders a conversation with the given arguments; may raise anything.
Render = Callable[..., str]

#: Lowercase letters only, because templates may strip, split, quote or change the case of a text.
_WORD, _OTHER, _FIRST_PART = "qzprobewordqz", "qzotherwordqz", "qzfirstwordqz"
#: What must be shown of two tools: names, descriptions and parameters; and of two documents: their titles or texts.
_TOOL_WORDS = [tuple(f"qz{what}{number}qz" for what in ("tool", "about", "parameter")) for number in ("one", "two")]
_DOCUMENT_WORDS = ("qzdocumentoneqz", "qzdocumenttwoqz")
_CALLED = {"name": _WORD, "arguments": json.dumps({_OTHER: "1"})}
_ASKING = {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": _CALLED}]}
#: Arguments that some templates need, tried one after another.
_EXTRAS: tuple[dict[str, object], ...] = ({}, {"documents": [{"title": "d", "text": "e"}]}, {"tools": []})
#: The order of preference among forms of calls that a template shows equally well; transformers' form first.
_PREFERENCE = sorted(CALL_FORMS, key=lambda form: (not form.as_object, form.content != "absent"))
#: Beginnings of a list of parts that a template printed as a whole.
_PRINTED_LIST = ("[{'type'", '[{"type"', "[{&#39;type", "[{&#34;type")
#: Signs of arguments in a form that the template does not expect: printed as a Python object, or quoted twice.
_WRONG_ARGUMENTS = (f"'{_OTHER}'", f'\\"{_OTHER}')


def _tool(name: str, description: str, parameter: str) -> dict[str, object]:
    properties = {parameter: {"type": "string", "description": "b"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _document(number: int, text: str) -> dict[str, object]:
    """Return a document with the names of fields that published templates read."""
    return {"title": text, "text": text, "content": text, "contents": text, "doc_id": number, "id": number}


_TOOLS = [_tool(*words) for words in _TOOL_WORDS]
_DOCUMENTS = list(itertools.starmap(_document, enumerate(_DOCUMENT_WORDS)))


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a chat template does.

    forms             role -> forms of content whose text it shows. Empty: it leaves the text out. Absent: unknown,
                      because it raised for every probe.
    takes_tools       whether it shows all ``tools``, with descriptions and parameters. Like the others: true if that is
                      unknown.
    beside_tools      whether this was found with ``tools`` in every probe.
    hides_tools       beginnings of conversations with which it does not show ``tools``.
    takes_calls       whether it shows the calls of past messages.
    takes_documents   whether it shows the title or the text of all ``documents``.
    shows_names       whether it shows the field ``name`` of users' messages.
    call_form         the form of messages with calls in which they are shown without flaws, such as "None".
    shows_turns       whether it shows all turns of a conversation.
    cuts_texts        whether it loses the end of long texts of users.
    partly_shown      roles whose messages may be lost, or their ends: in long conversations, or of long texts.
    merges_users      whether messages of the user in a row must be merged, because it leaves out one of them.
    folds_systems     whether instructions behind the first message must be moved, because texts are lost otherwise.
    hides_systems     whether instructions at the beginning must be moved if the last message is not the user's, because
                      they are lost otherwise.
    takes_one_call    whether only messages with one call each are shown in full.
    takes_calls_alone  whether only messages with calls and no text are shown in full.
    hides_texts_beside_calls  whether it leaves out texts beside calls in some conversations.
    failures          role -> why it fails for every conversation with messages of the role, by a fault of its own.
    refusal           the reason that it gives for refusing every conversation, or "".
    """

    forms: dict[str, list[Form]] = {}
    takes_tools: bool = True
    beside_tools: bool = False
    hides_tools: list[Lead] = []
    takes_calls: bool = True
    takes_documents: bool = True
    shows_names: bool = True
    call_form: CallForm = CALL_FORMS[0]
    shows_turns: bool = True
    cuts_texts: bool = False
    partly_shown: list[str] = []
    merges_users: bool = False
    folds_systems: bool = False
    hides_systems: bool = False
    takes_one_call: bool = False
    takes_calls_alone: bool = False
    hides_texts_beside_calls: bool = False
    failures: dict[str, str] = {}
    refusal: str = ""

    @property
    def loses_user_text(self) -> bool:
        return self.forms.get("user") == []

    def lacks(self, role: str) -> bool:
        """Whether messages of ``role`` are left out or refused, whatever the form of their content."""
        return not self.forms.get(role)


def find_facts(render: Render, with_tools: bool = False, arguments: Mapping[str, object] = {}) -> TemplateFacts:
    """Find out what a template does. ``render(messages, **arguments)`` renders it.

    with_tools  whether to probe conversations with tools, in which some templates show other parts.
    arguments   variables of every conversation.
    """
    probe = _Probe(render, {**arguments, **({"tools": [FILLER_TOOL]} if with_tools else {})})
    forms: dict[str, list[Form]] = {}
    failures: dict[str, str] = {}
    refusal = ""
    for role in ROLES:
        probe.raised.clear()
        shown = [probe.shows_text(role, form, forms) for form in FORMS]
        if all(each is None for each in shown):
            reason, is_refusal = _reason_of(probe.raised)
            if not is_refusal or (role == "user" and probe.refuses_anything(reason)):
                failures[role] = reason
            elif role == "user":
                refusal = reason
        else:
            forms[role] = [form for form, is_shown in zip(FORMS, shown, strict=True) if is_shown]
            if {"openai", "part"} <= set(forms[role]):
                forms[role].remove("part")
    if not forms:
        return TemplateFacts(failures=failures, refusal=refusal)
    takes_tools = probe.shows_argument(forms, itertools.chain(*_TOOL_WORDS), tools=_TOOLS)
    if with_tools and not takes_tools and probe.mentions_tools(forms):
        return find_facts(render, arguments=arguments)  # it is not given tools, of which it would show a part
    takes_calls, call_form = probe.calls(forms)
    shown_roles = frozenset(role for role, known in forms.items() if known)
    turns = TurnProbes(probe.text, lambda text, role: _content(text, _first(forms, role)), shown_roles)
    shows_calls = takes_calls and {"assistant", "tool"} <= shown_roles
    return TemplateFacts(
        forms=forms,
        takes_tools=takes_tools,
        beside_tools=with_tools,
        hides_tools=probe.leads_without_tools(forms),
        takes_calls=takes_calls,
        takes_documents=probe.shows_argument(forms, _DOCUMENT_WORDS, documents=_DOCUMENTS),
        shows_names=probe.shows_names(forms),
        call_form=call_form,
        shows_turns=turns.shows_turns(),
        cuts_texts=turns.cuts_long_texts(),
        partly_shown=turns.partly_shown(call_form),
        merges_users=turns.merges_users(),
        folds_systems=turns.folds_instructions(),
        hides_systems=turns.hides_systems(call_form),
        takes_one_call=shows_calls and turns.takes_one_call(call_form),
        takes_calls_alone=shows_calls and turns.takes_calls_alone(call_form),
        hides_texts_beside_calls=shows_calls and turns.hides_texts_beside_calls(call_form),
        failures=failures,
    )


def _reason_of(raised: Sequence[Exception]) -> tuple[str, bool]:
    """Return why a template raised, and whether it did so on purpose, with ``raise_exception``."""
    from jinja2 import TemplateError

    refusals = [each for each in raised if type(each) is TemplateError]
    first = next(iter(refusals or raised))
    return first_line(first)[:200], bool(refusals)


class _Probe:
    """Renders probes."""

    def __init__(self, render: Render, arguments: dict[str, object]) -> None:
        """``arguments``: those of every probe."""
        self.raised: list[Exception] = []  # since it was cleared
        self._render = render
        self._arguments = arguments

    def shows_text(self, role: str, form: Form, known: dict[str, list[Form]]) -> bool | None:
        """Whether content of this form is shown; None if the template raises for every conversation with it."""
        raised = True
        for conversation in _conversations(role, form, known):
            text = self.text(conversation)
            if text is None:
                continue
            raised = False
            # A template that shows only the first message would lose the user's text after a system message.
            is_shown = _WORD in text and (role not in INSTRUCTING or _OTHER in text)
            is_shown = is_shown and (form != "openai" or _FIRST_PART in text)
            if is_shown and not (form != "string" and any(mark in text for mark in _PRINTED_LIST)):
                return True
        return None if raised else False

    def shows_argument(self, known: dict[str, list[Form]], words: Iterable[str], **arguments: object) -> bool:
        """Whether all ``words`` of an argument are shown, in any conversation; true if the template raises for all."""
        raised, words = True, tuple(words)
        for conversation in _plain_conversations(known):
            text = self.text(conversation, **arguments)
            if text is not None:
                raised = False
                if all(word in text for word in words):
                    return True
        return raised

    def mentions_tools(self, known: dict[str, list[Form]]) -> bool:
        """Whether a conversation without calls has another text if there are tools."""
        for conversation in _plain_conversations(known):
            texts = self.text(conversation, tools=_TOOLS), self.text(conversation, tools=[])
            if None not in texts and texts[0] != texts[1]:
                return True
        return False

    def leads_without_tools(self, known: dict[str, list[Form]]) -> list[Lead]:
        """Return the beginnings of conversations with which ``tools`` are not shown; not those that it refuses."""
        user = {"role": "user", "content": _content("a", _first(known, "user"))}
        found: list[Lead] = []
        for lead in LEADS:
            role = "system" if lead == "empty" else lead
            first = {"role": role, "content": "" if lead == "empty" else _content("b", _first(known, role))}
            text = self.text([user] if lead == "none" else [first, user], tools=_TOOLS)
            if text is not None and _TOOL_WORDS[0][0] not in text:
                found.append(lead)
        return found

    def shows_names(self, known: dict[str, list[Form]]) -> bool:
        """Whether the name of a user is shown, in any conversation; true if the template raises for all."""
        asked = [[*each[:-1], {**each[-1], "name": _WORD}] for each in _plain_conversations(known)]
        texts = [text for text in map(self.text, asked) if text is not None]
        return not texts or any(_WORD in text for text in texts)

    def calls(self, known: dict[str, list[Form]]) -> tuple[bool, CallForm]:
        """Return whether calls are shown, true if the template raises for all; and the form in which they look best."""
        result = {"role": "tool", "tool_call_id": "call00001", "name": "f"}
        result["content"] = _content("1", _first(known, "tool"))
        raised = True
        saying = {**_ASKING, "content": _content("c", _first(known, "assistant"))}
        found: list[tuple[int, CallForm]] = []
        for form, asking in itertools.product(_PREFERENCE, (_ASKING, saying)):
            if asking is saying and not raised:
                continue
            for asked in _plain_conversations(known):
                for rest in ([result], [], [result, asked[-1]]):
                    [conversation] = itertools.islice(message_forms([*asked, asking, *rest], form), 1)
                    text = self.text(conversation)
                    raised = raised and text is None
                    if text is not None and (_WORD in text or _OTHER in text):
                        found.append((_flaws(text), form))
            if found and found[-1][0] == 0:
                break
        best = min(found, key=lambda each: each[0], default=(0, CALL_FORMS[0]))[1]
        return bool(found) or raised, best

    def refuses_anything(self, reason: str) -> bool:
        """Whether the template raises for this reason whatever the messages are."""
        for messages in ([], [{"role": _WORD, "content": _WORD}]):
            self.raised.clear()
            if self.text(messages) is not None or _reason_of(self.raised) != (reason, True):
                return False
        return True

    def text(self, conversation: Messages, **arguments: object) -> str | None:
        """Return the rendered text in lower case, or None if the template raises with and without documents."""
        for extra in _EXTRAS:
            try:
                return self._render(
                    conversation, add_generation_prompt=False, **(extra | self._arguments | arguments)
                ).lower()
            except (MemoryError, TimeoutError):
                raise
            except Exception as failure:  # templates raise anything
                self.raised.append(failure)
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
    return [part] if form == "part" else [{"type": "text", "text": _FIRST_PART}, part]


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
    message: dict[str, object] = {"role": role, "content": _content(_WORD, form)}

    def filler(name: str, fill: Form) -> dict[str, Any]:
        text = _OTHER if role in INSTRUCTING and name == "user" else "a"
        return {"role": name, "content": _content(text, (known[name] or [fill])[0] if name in known else fill)}

    for fill in (form, *(each for each in FORMS if each != form)):
        user, answer, system = (filler(name, fill) for name in ("user", "assistant", "system"))
        if role == "user":
            yield from ([message], [system, message], [user, answer, message], [message, answer, user])
        elif role == "assistant":
            yield from ([user, message, user], [user, message], [system, user, message, user])
        elif role in INSTRUCTING:
            yield from ([message, user], [message, user, answer, user])
        else:
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
            message |= {"tool_call_id": "call00001", "name": "f"}
            for content in (None, ""):
                asked = {"role": "assistant", "content": content, "tool_calls": [call]}
                yield from ([user, asked, message], [user, asked, message, answer, user], [user, asked, message, user])
            yield [user, answer, message]
