"""TurnProbes: what a chat template does with conversations of several turns, calls and instructions.

As in template_facts.py, every message of a probe has a word of its own, and the rendered text shows which are lost.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable, Iterator

from aiakq.runtime.text.message_forms import (
    INSTRUCTING,
    CallForm,
    message_forms,
    with_single_calls,
    with_text_before_calls,
    without_leading_systems,
)

Messages = list[dict[str, object]]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
#: For templates that show calls only beside tools.
FILLER_TOOL = {"type": "function", "function": {"name": "f", "description": "c", "parameters": _PARAMETERS}}
#: Words before the one that is looked for in a long text, and messages of a long conversation.
_LONG, _MANY = 10_000, 60
#: What ``_word`` returns.
_WORDS = re.compile("qzturnword[a-z]+qz")


class TurnProbes:
    """Renders conversations of several turns.

    render   returns the text of a conversation in lower case, or None if the template raises.
    content  returns a text as the content of a message of a role.
    shown    roles whose messages are shown.
    """

    def __init__(
        self, render: Callable[..., str | None], content: Callable[[str, str], object], shown: frozenset[str]
    ) -> None:
        self._render, self._content, self._shown = render, content, shown

    def cuts_long_texts(self) -> bool:
        """Whether the end of a long text of a user is lost."""
        return self._loses([[*lead, ("user", "a\n" * _LONG)] for lead in self._leads()])

    def partly_shown(self, form: CallForm) -> list[str]:
        """Roles of messages that may be lost: those of long conversations, the ends of long texts, or some in a row.

        form  the form of messages with calls.
        """
        turns = [("user", ""), ("assistant", "")] * (_MANY // 2)
        if self._loses([[*lead, *turns, ("user", "")] for lead in self._leads()]):
            return sorted(self._shown)
        user, long = ("user", ""), "a\n" * _LONG
        conversations = {
            "system": [[("system", long), user]],
            "developer": [[("developer", long), user]],
            "assistant": [[user, ("assistant", long), user], [user, ("assistant", ""), ("assistant", ""), user]],
        }
        found = [role for role, each in conversations.items() if role in self._shown and self._loses(each)]
        return found + (["tool"] if "tool" in self._shown and self._cuts_results(form) else [])

    def _cuts_results(self, form: CallForm) -> bool:
        """Whether the end of a long result is lost, or one of two results."""
        user, one = self._said("user", "a"), self._result("b", "a\n" * _LONG)
        cut = [user, self._calling("b"), one]
        two = [user, self._calling("bc"), self._result("b"), self._result("c")]
        two = with_single_calls(two) if self.takes_one_call(form) else two
        return any(self._shows_calls(each, form, "r") is False for each in (cut, [*cut, user], two))

    def shows_turns(self) -> bool:
        """Whether all turns of a conversation are shown."""
        turns = [("user", ""), ("assistant", ""), ("user", "")]
        longer = [*turns, ("assistant", ""), ("user", "")]
        return not self._loses([[*lead, *rest] for lead in self._leads() for rest in (turns, longer)])

    def merges_users(self) -> bool:
        """Whether one of two messages of the user in a row is lost."""
        users = [("user", ""), ("user", "")]
        answered = [("user", ""), ("assistant", ""), *users]
        return self._loses([[*lead, *rest] for lead in self._leads() for rest in (users, answered)])

    def folds_instructions(self) -> bool:
        """Whether a text is lost if there are messages of the system or of developers behind the first message."""
        user, answer = ("user", ""), ("assistant", "")
        conversations = []
        for role, lead in itertools.product(INSTRUCTING, self._leads()):
            late = (role, "")
            if role not in self._shown:
                continue
            conversations += [
                [*lead, user, answer, late, user],
                [*lead, user, answer, late, user, answer, late, user],
                [*lead, user, answer, user, late],
                [*lead, user, late, user],
            ]
            if lead:
                conversations += [[*lead, late, user], [*lead, late, late, user]]
        return self._loses(conversations)

    def hides_systems(self, form: CallForm) -> bool:
        """Whether the system's text at the beginning is lost if the last message is not the user's."""
        if "system" not in self._shown:
            return False
        begun = [self._said("system", "a"), self._said("user", "b")]
        answered, returned = [self._said("assistant", "c")], [self._calling("c"), self._result("c")]
        return any(
            self._shows_calls(each, form) is False and bool(self._shows_calls(without_leading_systems(each), form))
            for each in ([*begun, *answered], [*begun, *returned])
        )

    def takes_one_call(self, form: CallForm) -> bool:
        """Whether only messages with one call each are shown in full."""
        messages = [self._said("user", "a"), self._calling("bc"), self._result("b"), self._result("c")]
        return self._needs(with_single_calls, messages, form)

    def takes_calls_alone(self, form: CallForm) -> bool:
        """Whether only messages with calls and no text are shown in full."""
        messages = [self._said("user", "a"), {**self._said("assistant", "b"), **self._calling("c")}, self._result("c")]
        return self._needs(with_text_before_calls, messages, form)

    def hides_texts_beside_calls(self, form: CallForm) -> bool:
        """Whether a text beside calls is lost in some conversation, such as one that continues after the calls."""
        user, answer, asked = self._said("user", "a"), self._said("assistant", "y"), self._said("user", "z")
        first, second = (
            [{**self._said("assistant", one), **self._calling(two)}, self._result(two)] for one, two in ("bc", "de")
        )
        thinking = {**first[0], "reasoning_content": "f", "reasoning": "f"}
        begun = (
            [user, *first],
            [user, thinking, first[1]],
            [user, *first, *second],
            [user, *first, answer, asked, *second],
        )
        rest: list[Messages] = [[], [asked], [answer], [answer, asked]]
        return any(self._shows_calls([*one, *two], form, "bd") is False for one, two in itertools.product(begun, rest))

    def _needs(self, change: Callable[[Messages], Messages], messages: Messages, form: CallForm) -> bool:
        """Whether all texts of ``messages`` are shown only after ``change``."""
        asked = self._said("user", "z")
        whole = ([*messages], [*messages, asked])
        if any(self._shows_calls(each, form) for each in whole):
            return False
        return any(self._shows_calls(change(each), form) for each in whole)

    def _shows_calls(self, messages: Messages, form: CallForm, of: str = "") -> bool | None:
        """Whether all words of messages are shown, or those ``of`` some letters ("r": results); None if it raises."""
        [conversation] = itertools.islice(message_forms(messages, form), 1)
        text = self._render(conversation)
        if text is None:
            return None
        return all(word in text for word in _WORDS.findall(json.dumps(messages)) if not of or word[-3] in of)

    def _said(self, role: str, letter: str) -> dict[str, object]:
        return {"role": role, "content": self._content(_word(letter), role)}

    def _calling(self, letters: str) -> dict[str, object]:
        called = [
            {
                "id": f"call0000{letter}",
                "type": "function",
                "function": {"name": "f", "arguments": {"a": _word(letter)}},
            }
            for letter in letters
        ]
        return {"role": "assistant", "tool_calls": called}

    def _result(self, letter: str, beginning: str = "") -> dict[str, object]:
        """The result of the call ``letter``, with a word of its own."""
        content = self._content(beginning + _word(letter + "r"), "tool")
        return {"role": "tool", "tool_call_id": f"call0000{letter}", "name": "f", "content": content}

    def _leads(self) -> Iterator[list[tuple[str, str]]]:
        """Yield the beginnings of conversations: none, and one of each instructing role that is shown."""
        yield []
        for role in INSTRUCTING:
            if role in self._shown:
                yield [(role, "")]

    def _loses(self, conversations: list[list[tuple[str, str]]]) -> bool:
        """Whether a text is lost in any of ``conversations``, each a list of (role, beginning of the text)."""
        for conversation in conversations:
            messages, words = [], []
            for number, (role, beginning) in enumerate(conversation):
                word = _word("".join(map(string.ascii_lowercase.__getitem__, divmod(number, 26))))
                messages.append({"role": role, "content": self._content(beginning + word, role)})
                if role in self._shown:
                    words.append(word)
            text = self._render(messages)
            if text is not None and not all(word in text for word in words):
                return True
        return False


def _word(letters: str) -> str:
    return f"qzturnword{letters}qz"
