"""What a chat answer has to match: the calls of tools, the format of the response, and the reasoning before both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.structured.formats import (
    Format,
    either,
    format_of,
    regex,
    schema,
    sequence,
    some_tags,
    tag_grammar_of,
    text_up_to,
    text_with_tags,
)
from aiakq.runtime.structured.grammars import Grammar
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.service import Service
from aiakq.server.api.tool_parsers.base import PlainJsonParser, ToolParser
from aiakq.server.api.tools import Tool, calls_tools, forced_tools

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_BLANKS = regex(r"[ \n\r\t]{0,4}")


def tool_parser_of(service: Service, request: Any) -> type[ToolParser] | None:
    """The parser of calls in the answer to ``request``; None: there are none."""
    if not calls_tools(request.tools, request.tool_choice):
        return None
    parser = service.message_format.tool_parser
    if forced_tools(request.tools, request.tool_choice) is None:
        return parser
    return PlainJsonParser if parser is None or parser.call_tags({}, True) is None else parser


async def answer_grammar(
    service: Service, request: Any, own: Grammar | None, reasoning: tuple[type[ReasoningParser], bool] | None
) -> Grammar | None:
    """What the answer has to match, checked; None: anything.

    own        what the fields for structured output say.
    reasoning  its parser, and whether it is open at the end of the prompt; None: there is none.

    Raises ``grammar_not_enforceable`` and ``unsupported_parameter``.
    """
    parser = tool_parser_of(service, request)
    calls = None if parser is None else _Calls(service, request, parser)
    if own is not None:
        await service.text.check_grammar(own, request.grammar_name())
    if calls is None or not calls.are_enforced:
        if own is None or reasoning is None:
            return own
        return await _checked(service, _behind_reasoning(format_of(own), *reasoning), own, request.grammar_name())
    wrap = (lambda part: part) if reasoning is None else lambda part: _behind_reasoning(part, *reasoning)
    like = own or Grammar("structural_tag", "", closed=True)
    try:
        return await _checked(service, wrap(calls.format(calls.schemas, own)), like, "tools")
    except AiakqError as failure:
        if failure.id != "grammar_not_enforceable":
            raise
    schemas = await calls.enforceable_schemas()
    return await _checked(service, wrap(calls.format(schemas, own)), like, "tools")


class _Calls:
    """The calls that the answer to a request may have.

    are_enforced  whether a grammar is needed, and there is one.
    schemas       JSON schemas of the arguments, by the name of the tool.
    """

    def __init__(self, service: Service, request: Any, parser: type[ToolParser]) -> None:
        self._service, self._parser = service, parser
        forced = forced_tools(request.tools, request.tool_choice)
        self._tools: Sequence[Tool] = request.tools if forced is None else forced
        self._is_forced = forced is not None
        self._only_one = isinstance(request.tool_choice, Mapping) or request.parallel_tool_calls is False
        self.schemas = {tool.function.name: _arguments_schema(tool) for tool in self._tools}
        self.are_enforced = self._is_forced or bool(parser.triggers)
        if self.are_enforced:
            return
        for number, tool in enumerate(self._tools):
            if tool.function.strict:
                reason = "with tool_choice 'auto' calls in the format of this model cannot be enforced; 'required' can"
                raise error("unsupported_parameter", param=f"tools[{number}].function.strict", reason=reason)
        if request.grammar_and_name() is not None:
            reason = "it does not go with tools whose calls cannot be enforced, unless tool_choice is 'none'"
            raise error("unsupported_parameter", param=request.grammar_name(), reason=reason)

    def format(self, schemas: Mapping[str, Any], own: Grammar | None) -> Format:
        """Calls with arguments of these ``schemas``, or what is possible instead of them."""
        tags = self._parser.call_tags(schemas, self._only_one)
        assert tags is not None, "parsers with triggers have tags"
        # All calls of an array are in one tag.
        calls = some_tags(tags, self._parser.separator, only_one=self._only_one or not self._parser.separator)
        if self._is_forced:
            return calls
        if own is not None:
            return either(calls, format_of(own))
        return text_with_tags(tags, self._parser.triggers, only_one=self._only_one)

    async def enforceable_schemas(self) -> dict[str, Any]:
        """``schemas``, with any object for those that cannot be enforced. Raises ``grammar_not_enforceable`` for one of
        them that is strict.
        """
        found = {}
        for number, tool in enumerate(self._tools):
            name = tool.function.name
            found[name] = self.schemas[name]
            try:
                param = f"tools[{number}].function.parameters"
                await _checked(self._service, schema(found[name]), Grammar("json", "", closed=True), param)
            except AiakqError as failure:
                if failure.id != "grammar_not_enforceable" or tool.function.strict:
                    raise
                found[name] = {"type": "object"}
        return found


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of ``tool``, which are an object."""
    given = tool.function.parameters
    return {"type": "object", **given} if given else _NO_ARGUMENTS


def _behind_reasoning(answer: Format, parser: type[ReasoningParser], is_open: bool) -> Format:
    """``answer`` where it begins: behind the reasoning, if there is any."""
    if not parser.has_answer_mark:
        reason = "the text of this model is in channels, in which it cannot be enforced"
        raise error("unsupported_parameter", param="response_format", reason=reason)
    rest = sequence(_BLANKS, answer)
    ended = [sequence(text_up_to(end), rest) for end in parser.ends]
    if is_open:
        return either(*ended)
    begun = [sequence(text_up_to(end, start), rest) for start in parser.starts for end in parser.ends]
    return either(answer, *begun)


async def _checked(service: Service, part: Format, like: Grammar, param: str) -> Grammar:
    """The grammar of ``part``, with the operator's defaults. Raises ``grammar_not_enforceable``."""
    grammar = service.model.limits.grammars.apply(tag_grammar_of(part, like))
    await service.text.check_grammar(grammar, param)
    return grammar
