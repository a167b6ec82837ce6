"""ChatTemplate: render conversations in the forms that a model's chat template takes.

The server, ``LLM.chat`` and calibration render with this class, so that they give the same text. For messages in the
form that the template takes, it is the text of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.protocol.media import PLURALS, MediaKind
from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.message_forms import (
    INSTRUCTING,
    REASONING,
    appended,
    folded,
    joined_text,
    message_forms,
    texts_beside_calls,
    with_single_calls,
    with_text_before_calls,
    with_texts_apart,
    with_texts_joined,
    with_users_merged,
    without_leading_systems,
)
from aiakq.runtime.text.message_parts import as_parts
from aiakq.runtime.text.template_facts import FORMS, ROLES, Messages, TemplateFacts, find_facts
from aiakq.runtime.text.tools_in_text import DEFAULT_SYNTAX, CallSyntax, without_tools
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER

#: Values of --chat-template-content-format; auto: found by rendering probes.
CONTENT_FORMATS = ("auto", "string", "openai")
#: Variables and options of rendering that callers must not set as arguments of a template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "template", "chat_template", "content_format"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "self", "syntax"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("sanitize_control_tokens", "bos_token", "eos_token"),
    }
)
#: Editors write it at the beginning of a file; transformers passes it on to the prompt.
BYTE_ORDER_MARK = "\ufeff"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChatTemplate:
    """A Jinja template and what is known about it.

    special_tokens  variables of the template, such as bos_token.
    placeholders    those of media by kind, for templates that take no parts.
    """

    placeholders: Mapping[MediaKind, str] = {}

    def __init__(self, text: str, special_tokens: Mapping[str, object], facts: TemplateFacts) -> None:
        self.text = text.lstrip(BYTE_ORDER_MARK)
        self.facts = facts
        self._special_tokens = special_tokens

    @cached_property
    def _takes_strings(self) -> frozenset[str]:
        """Roles whose messages may have strings as content."""
        return frozenset(role for role, forms in self.facts.forms.items() if "string" in forms)

    @classmethod
    def checked(
        cls,
        text: str,
        special_tokens: Mapping[str, object],
        content_format: str = "auto",
        source: str = "of the model",
        with_tools: bool = False,
        arguments: Mapping[str, object] = {},
    ) -> ChatTemplate:
        """Compile a template and find out what it does.

        Raises ``template_unusable``, ``template_loses_users``, and ``template_form`` for a ``content_format`` in which
        it does not show the text of users.

        content_format  one of CONTENT_FORMATS.
        source          how errors refer to the template.
        with_tools      whether it is for conversations with tools.
        arguments       variables that the template gets in every conversation.
        """
        check_compiles(text, source)
        template = cls(text, special_tokens, TemplateFacts())
        facts = find_facts(template._rendered, with_tools, arguments)
        if with_tools and (not facts.forms or facts.loses_user_text):
            failure = facts.failures.get("user")
            facts = find_facts(template._rendered, arguments=arguments)
            if failure is not None:
                facts = msgspec.structs.replace(facts, failures=facts.failures | {"tools": failure})
        if "user" in facts.failures:
            raise error("template_unusable", source=source, reason=_failing(facts.failures["user"]))
        if content_format != "auto":
            chosen = [form for form in FORMS if form == content_format]
            if content_format == "openai" and "part" in facts.forms.get("user", chosen):
                chosen = ["part"]
            if facts.forms.get("user", chosen) and chosen[0] not in facts.forms.get("user", chosen):
                raise error("template_form", source=source, form=content_format)
            forms = {role: chosen if chosen[0] in known else known for role, known in facts.forms.items()}
            facts = msgspec.structs.replace(facts, forms={"user": chosen} | forms)
        if facts.loses_user_text:
            reason = "leaves out the text of users, both as a string and as a list of parts"
            raise error("template_loses_users", source=source, reason=reason)
        if facts.cuts_texts:
            raise error("template_loses_users", source=source, reason="leaves out the end of long texts of users")
        return cls(text, special_tokens, facts)

    def render(self, messages: Messages, syntax: CallSyntax = DEFAULT_SYNTAX, /, **arguments: Any) -> str:
        """Return the text of a conversation; ``arguments`` are variables of the template, such as ``tools``.

        syntax  how calls are written if the template has no place for tools.

        Tries variants of the messages and tools until the template accepts one, and raises the first failure of the
        template otherwise, which may be anything. Raises ``template_loses`` for text that the template leaves out.
        """
        self._check_shown(messages, arguments)
        if self.facts.lacks("developer"):
            messages = [each | {"role": "system"} if each.get("role") == "developer" else each for each in messages]
        listed = [] if self.facts.takes_tools else arguments.get("tools") or []
        if listed and not self.facts.beside_tools:
            del arguments["tools"]
        if arguments.get("tools") and not listed:
            messages = self._led_to_tools(messages)
        messages = without_tools(messages, listed, self.facts, syntax)
        if messages and messages[0].get("role") == "system":
            hidden = self.facts.hides_systems and messages[-1].get("role") != "user"
            if hidden or self.facts.forms.get("system") == []:
                messages = without_leading_systems(messages)
        messages = self._in_turns(messages)
        text = self._in_accepted_turns(messages, arguments)
        tools = () if listed else arguments.get("tools") or ()
        if not _shows_names(tools, text):
            if messages[0].get("role") not in INSTRUCTING and not self.facts.lacks("system"):
                text = self._in_accepted_form([{"role": "system", "content": ""}, *messages], arguments)
            if not _shows_names(tools, text):
                raise error("template_loses", param="tools", what="tools in this conversation")
        return text

    def _in_accepted_turns(self, messages: Messages, arguments: Mapping[str, object]) -> str:
        """Return the text of the messages, if need be with the texts beside calls elsewhere. Raises as ``render``.

        Templates in which users and assistants alternate refuse a second text of the same turn, and those for models
        with channels refuse a text beside calls and reasoning.
        """
        try:
            return self._in_accepted_form(messages, arguments)
        except (AiakqError, MemoryError, TimeoutError):
            raise
        except Exception as failure:
            for form in self._turn_forms(messages):
                try:
                    return self._in_accepted_form(form, arguments)
                except (AiakqError, MemoryError, TimeoutError):
                    raise
                except Exception:
                    continue
            raise failure

    def _turn_forms(self, messages: Messages) -> Iterator[Messages]:
        """Yield the messages with the assistant's texts in other places than beside calls."""
        facts, forms = self.facts, [messages]
        if texts := [each for each in texts_beside_calls(messages) if REASONING.intersection(messages[each])]:
            forms.insert(0, with_texts_apart(messages, texts))
            yield forms[0]
        if facts.takes_calls_alone or facts.hides_texts_beside_calls:
            for form in forms:
                joined = with_texts_joined(form)
                if joined != form:
                    yield joined

    def _in_accepted_form(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """Return the text of the messages in the first form that the template accepts. Raises as ``render``."""
        failure: Exception | None = None
        for tools in _tool_forms(arguments.get("tools")):
            given = arguments if tools is None else {**arguments, "tools": tools}
            for form in message_forms(messages, self.facts.call_form):
                try:
                    text = well_formed(self._rendered([self._in_form(message) for message in form], **given))
                    _check_other_roles(messages, text)
                    if self.facts.hides_texts_beside_calls and (lost := self._lost_beside_calls(form, given)):
                        return self._in_accepted_turns(with_texts_apart(form, lost), given)
                    if self.facts.partly_shown:
                        self._check_ends(form, given)
                    return text
                except AiakqError:
                    raise
                except (MemoryError, TimeoutError):
                    raise
                except Exception as exception:  # the first error: all forms may fail for the same reason
                    failure = failure or exception
        assert failure is not None
        raise failure

    def _rendered(self, messages: Messages, **arguments: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        values = {**self._special_tokens, **arguments}
        return render_jinja_template(conversations=[messages], chat_template=self.text, **values)[0][0]

    def _lost_beside_calls(self, messages: Messages, arguments: Mapping[str, object]) -> list[int]:
        """Return the numbers of messages with calls whose text is lost."""
        return self._lost(messages, texts_beside_calls(messages), arguments)

    def _check_ends(self, messages: Messages, arguments: Mapping[str, object]) -> None:
        """Raise ``template_loses`` for a message that is lost, or its end, of a role of which it may be."""
        shown = self.facts.partly_shown
        numbers = [place for place, each in enumerate(messages) if each.get("role") in shown and each.get("content")]
        for number in self._lost(messages, numbers, arguments):
            role = messages[number].get("role")
            what = f"long texts or conversations (a message of the role {role!r:.64} is cut off or left out)"
            raise error("template_loses", param="messages", what=what)

    def _lost(self, messages: Messages, numbers: Sequence[int], arguments: Mapping[str, object]) -> list[int]:
        """Return which of the messages, given by ``numbers``, are lost, or their ends."""
        if not numbers:
            return []
        marked, words = list(map(self._in_form, messages)), {}
        for number in numbers:
            words[number] = word = f"qzend{number}qz"
            content = messages[number]["content"]
            ended = f"{content} {word}" if isinstance(content, str) else appended(content, word)
            marked[number] = self._in_form({**messages[number], "content": ended})
        text = self._rendered(marked, **arguments).lower()
        return [number for number, word in words.items() if word not in text]

    def _in_form(self, message: dict[str, object]) -> dict[str, object]:
        """Return a message with its content in the form that the template takes for its role."""
        content = message.get("content")
        if isinstance(content, str) and message.get("role") in self._takes_strings:
            return message
        forms = self.facts.forms.get(str(message.get("role"))) or self.facts.forms.get("user") or FORMS[:1]
        if isinstance(content, list) and "openai" not in forms:
            content = joined_text([self._text_of_media(part) for part in content])
        if isinstance(content, str) and "string" not in forms:
            content = as_parts([content])
        return {**message, "content": content} if "content" in message else message

    def _text_of_media(self, part: Any) -> Any:
        kind: Any = part.get("type") if isinstance(part, dict) else None
        return {"type": "text", "text": self.placeholders.get(kind, "")} if kind in PLURALS else part

    def _led_to_tools(self, messages: Messages) -> Messages:
        """Return the messages with a beginning with which the template shows tools."""
        first, hidden = messages[0], self.facts.hides_tools
        role = first.get("role")
        if role == "system" and not first.get("content") and "empty" in hidden:
            return messages[1:] if "none" not in hidden and len(messages) > 1 else messages
        if role == "developer" and "developer" in hidden and "system" not in hidden:
            return [{**first, "role": "system"}, *messages[1:]]
        if role not in INSTRUCTING and "none" in hidden and "empty" not in hidden:
            return [{"role": "system", "content": ""}, *messages]
        return messages

    def _in_turns(self, messages: Messages) -> Messages:
        """Return the messages in an order in which the template shows all. Raises ``template_loses``."""
        facts = self.facts
        if facts.takes_calls_alone:
            messages = with_text_before_calls(messages)
        if facts.takes_one_call:
            messages = with_single_calls(messages)
        folds = facts.folds_systems or facts.forms.get("system") == []
        if folds and any(message.get("role") in INSTRUCTING for message in messages[1:]):
            messages = folded(messages)
        if facts.merges_users:
            messages = with_users_merged(messages)
        if not facts.shows_turns and sum(message.get("role") not in INSTRUCTING for message in messages) > 1:
            raise error("template_loses", param="messages", what="the messages of several turns")
        return messages

    def _check_shown(self, messages: Messages, arguments: Mapping[str, object]) -> None:
        if arguments.get("documents") and not self.facts.takes_documents:
            raise error("template_loses", param="documents", what="documents")
        if self.facts.forms.get("assistant") == []:
            for number, message in enumerate(messages):
                if message.get("role") == "assistant" and message.get("content"):
                    raise error("template_loses", param=f"messages[{number}]", what="messages of the assistant")


def template_of(tokenizer: Any, given: str | None, with_tools: bool) -> str:
    """Return the template of a transformers tokenizer, or the one that is ``given``; see ``get_chat_template`` there.

    Raises ``no_default_template`` for named templates of which none is for the conversation.
    """
    try:
        template: str = tokenizer.get_chat_template(given, tools=[{}] if with_tools else None)
    except ValueError:
        names = ", ".join(sorted(map(repr, tokenizer.chat_template))[:8])
        raise error("no_default_template", names=f"{names:.200}") from None
    return template


def check_compiles(text: str, source: str) -> None:
    """Raise ``template_unusable`` with the line for a template that does not compile."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if text.startswith(LFS_POINTER.decode()):
        raise error("template_unusable", source=source, reason=IS_LFS_POINTER)
    try:
        _compile_jinja_template(text.lstrip(BYTE_ORDER_MARK))
    except TemplateError as failure:
        line = getattr(failure, "lineno", None)
        reason = first_line(str(failure.message or failure), "it does not compile")
        where = "" if line is None else f"line {line}: "
        raise error("template_unusable", source=source, reason=f"{where}{reason[:200]}") from None
    except (RecursionError, SyntaxError, ValueError, TypeError, OverflowError) as failure:
        reason = f"it does not compile ({type(failure).__name__})"
        raise error("template_unusable", source=source, reason=reason) from None


def _failing(reason: str) -> str:
    """Return why a template cannot be used that fails for every conversation."""
    hint = "; --default-chat-template-kwargs can set a variable" if "is undefined" in reason else ""
    return f"it fails for every conversation: {reason}{hint}"


def _check_other_roles(messages: Messages, text: str) -> None:
    """Raise ``template_loses`` for a message whose text is not in ``text``.

    Checks those of a role that is not in ``ROLES``, and results without a call before them.
    """
    has_calls = False
    for number, message in enumerate(messages):
        role = message.get("role")
        has_calls = role == "tool" and has_calls or bool(message.get("tool_calls"))
        if role in ROLES and (role != "tool" or has_calls):
            continue
        words = joined_text(message.get("content")).split()
        if words and words[0].lower() not in text.lower():
            raise error("template_loses", param=f"messages[{number}].role", what=f"messages of the role {role!r:.64}")


def check_chat_arguments(content_format: str, kwargs: Mapping[str, object]) -> None:
    """Raise ``value_out_of_range`` or ``unsupported_parameter`` for arguments of ``LLM.chat`` that cannot be used."""
    if content_format not in CONTENT_FORMATS:
        allowed, param = ", ".join(CONTENT_FORMATS), "chat_template_content_format"
        raise error("value_out_of_range", param=param, value=str(content_format)[:64], allowed=allowed)
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{name:.64}"
            raise error("unsupported_parameter", param=param, reason="the name is taken")


def as_template_error(failure: Exception) -> AiakqError:
    """Return what a template raised as the error ``chat_template``."""
    return error("chat_template", reason=first_line(failure)[:200])


def _shows_names(tools: Sequence[object], text: str) -> bool:
    """Whether ``text`` has the names of all ``tools``, as far as a template writes them as they are."""
    functions = [tool.get("function") or tool for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    plain = [name for name in names if isinstance(name, str) and _PLAIN_NAME.fullmatch(name)]
    return all(name in text for name in plain) or all(name.lower() in text.lower() for name in plain)


def _tool_forms(tools: list[Any] | None) -> Iterator[list[Any] | None]:
    """Yield the tools as they are, and then with the fields without which some templates fail."""
    yield tools
    if not tools:
        yield []  # for templates that read its length
        return
    if not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        return
    filled = [{**tool, "function": _filled(tool["function"])} for tool in tools]
    if filled != tools:
        yield filled


def _filled(function: dict[str, object]) -> dict[str, object]:
    filled = dict(function)
    for name, value in (("description", ""), ("parameters", _NO_PARAMETERS)):
        if filled.get(name) is None:
            filled[name] = value
    if isinstance(filled["parameters"], dict):
        filled["parameters"] = {**_NO_PARAMETERS, **filled["parameters"]}
    return filled
