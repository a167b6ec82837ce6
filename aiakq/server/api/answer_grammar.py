"""Grammars of chat responses: tool calls, response format, and the reasoning before both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.structured.formats import (
    Format,
    after_thought,
    either,
    format_of,
    schema,
    some_tags,
    tag_grammar_of,
    with_thoughts,
)
from aiakq.server.api.conversation import ChatMessage
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.tool_parsers.base import PlainJsonParser, ToolParser
from aiakq.server.api.tool_schemas import ToolSchemaChecks, arguments_schema, writable_schemas
from aiakq.server.api.tools import Tool, calls_tools, forced_tools
from aiakq.server.process.text_messages import TextReply


class MessageRequest(Protocol):
    """A request for a message, which may call tools."""

    messages: list[ChatMessage]
    continue_final_message: bool | None
    tools: list[Tool] | None
    tool_choice: object
    parallel_tool_calls: bool | None
    include_reasoning: bool | None

    def grammar_name(self) -> str:
        """Return the name of the field with the grammar of the response."""


def tool_parser_of(renderer: Renderer, request: MessageRequest) -> type[ToolParser] | None:
    """Return the parser of tool calls for ``request``, or None if it allows no calls."""
    if not calls_tools(request.tools, request.tool_choice):
        return None
    parser = renderer.message_format.tool_parser
    forced = forced_tools(request.tools, request.tool_choice)
    if forced is None:
        return parser
    numbers = {tool.function.name: number for number, tool in enumerate(request.tools or ())}
    schemas = {tool.function.name: arguments_schema(numbers[tool.function.name], tool) for tool in forced}
    return parser if parser is not None and parser.has_grammar(schemas) else PlainJsonParser


async def answer_grammar(
    renderer: Renderer, request: MessageRequest, request_grammar: Grammar | None, reasoning: Reasoning | None
) -> Grammar | None:
    """Return the grammar that the response must match, after checking it; None if any text is allowed.

    request_grammar  grammar of the fields for structured output.
    reasoning        None if reasoning is not separated from the answer.

    Raises ``grammar_not_enforceable``, ``unsupported_parameter`` and ``value_out_of_range``.
    """
    parser = tool_parser_of(renderer, request)
    calls = None if parser is None else _Calls(renderer, request, parser, request_grammar)
    if calls is None or not calls.are_enforced:
        if request_grammar is not None and reasoning is not None:
            name = request.grammar_name()
            return await _checked(renderer, reasoning.before(format_of(request_grammar), name), request_grammar, name)
        if request_grammar is not None:
            return await renderer.text.check_grammar(request_grammar, request.grammar_name())
        return None

    async def grammar(schemas: Mapping[str, object]) -> Grammar:
        part = calls.format(schemas)
        if reasoning is not None:
            if not reasoning.is_closed and not calls.is_forced and request_grammar is None:
                part = with_thoughts(part, reasoning.parser.starts, reasoning.parser.ends)
            may_end = not calls.is_forced and request_grammar is None
            part = reasoning.before(part, "tools", may_end=may_end, may_end_with_call=not may_end)
        return await _checked(renderer, part, request_grammar, "tools")

    try:
        return await grammar(calls.schemas)
    except AiakqError as failure:
        if failure.id != "grammar_not_enforceable":
            raise
    if request_grammar is not None:
        await renderer.text.check_grammar(request_grammar, request.grammar_name())
    checks = calls.checks()
    schemas = await checks.enforceable(calls.schemas)
    try:
        return await grammar(schemas)
    except AiakqError as failure:
        if failure.id != "grammar_not_enforceable":
            raise
    return await grammar(checks.loosest(schemas))


@dataclass(frozen=True)
class Reasoning:
    """How the response begins.

    is_open    whether it begins with reasoning, whose start mark is in the prompt.
    is_closed  whether the prompt has ended the reasoning, so that the response begins with the answer.
    """

    parser: type[ReasoningParser]
    is_open: bool
    is_closed: bool = False

    def before(self, answer: Format, param: str, may_end: bool = False, may_end_with_call: bool = False) -> Format:
        """Return a grammar of optional reasoning followed by ``answer``; nothing is enforced in the reasoning.

        param              request field that requires ``answer``, for errors.
        may_end            whether the response may end within the reasoning, without an answer.
        may_end_with_call  whether it may if it ends with a call, which the parser finds: see ``after_thought``.
        """
        parser = self.parser
        if not parser.has_answer_mark:
            reason = "the text of this model is in channels, in which it cannot be enforced"
            raise error("unsupported_parameter", param=param, reason=reason)
        if self.is_closed:
            return answer
        return after_thought(
            answer,
            parser.starts,
            parser.ends,
            is_open=self.is_open,
            may_end=may_end,
            may_end_with_call=may_end_with_call,
        )


class _Calls:
    """The tool calls that the response may contain.

    are_enforced  whether a grammar enforces their format.
    is_forced     whether there must be a call.
    schemas       tool name -> JSON schema of the arguments.
    """

    def __init__(
        self, renderer: Renderer, request: MessageRequest, parser: type[ToolParser], request_grammar: Grammar | None
    ) -> None:
        """own: grammar of a message without calls, or None for any text."""
        self._renderer, self._parser, self._request_grammar = renderer, parser, request_grammar
        forced = forced_tools(request.tools, request.tool_choice)
        self._tools = [(tool.number, tool) for tool in request.tools or () if forced is None or tool in forced]
        self.is_forced = forced is not None
        self._only_one = isinstance(request.tool_choice, Mapping) or request.parallel_tool_calls is False
        self.schemas = {tool.function.name: arguments_schema(number, tool) for number, tool in self._tools}
        if not self.is_forced and parser.triggers and not parser.has_grammar(self.schemas):
            self.schemas = writable_schemas(self._tools, self.schemas, parser.has_grammar)
        self.are_enforced = self.is_forced or (bool(parser.triggers) and parser.has_grammar(self.schemas))
        if self.are_enforced:
            return
        for number, tool in self._tools:
            if tool.function.strict:
                reason = "with tool_choice 'auto' calls in the format of this model cannot be enforced; 'required' can"
                raise error("unsupported_parameter", param=f"tools[{number}].function.strict", reason=reason)
        if request_grammar is not None:
            reason = "it does not go with tools whose calls cannot be enforced, unless tool_choice is 'none'"
            raise error("unsupported_parameter", param=request.grammar_name(), reason=reason)

    def format(self, schemas: Mapping[str, Any]) -> Format:
        """Return the format of calls with these argument ``schemas``, or of a message without calls if allowed."""
        if not self.is_forced and self._request_grammar is None:
            return self._parser.answer_format(schemas, self._only_one)
        tags = self._parser.call_tags(schemas, self._only_one)
        # In an array format, one tag contains all calls.
        calls = some_tags(tags, self._parser.separator, only_one=self._only_one or not self._parser.separator)
        return (
            calls
            if self.is_forced or self._request_grammar is None
            else either(calls, format_of(self._request_grammar))
        )

    def checks(self) -> ToolSchemaChecks:
        """Return the checks of each tool, for requests whose tools cannot be enforced together."""

        async def check(schemas: Sequence[object]) -> TextReply:
            part = either(*map(schema, schemas))
            like = _with_defaults(self._renderer, part, self._request_grammar)
            return await self._renderer.text.compile_grammar(like)

        async def relax(value: object) -> TextReply:
            like = _with_defaults(self._renderer, schema(value), self._request_grammar)
            return await self._renderer.text.relax_schema(value, like)

        return ToolSchemaChecks(self._tools, check, relax)


async def _checked(renderer: Renderer, part: Format, like: Grammar | None, param: str) -> Grammar:
    """Return the grammar of ``part`` with the operator's defaults. Raises ``grammar_not_enforceable``."""
    return await renderer.text.check_grammar(_with_defaults(renderer, part, like), param)


def _with_defaults(renderer: Renderer, part: Format, like: Grammar | None) -> Grammar:
    return renderer.limits.grammars.apply(tag_grammar_of(part, like))
