"""JSON schemas of the arguments of tools, as far as they can be enforced."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import json_text
from aiakq.runtime.structured.relaxed_schemas import loosest_schema
from aiakq.server.api.output.argument_schemas import NO_ARGUMENTS, clean_arguments
from aiakq.server.api.tools import Tool
from aiakq.server.process.text_messages import TextReply

logger = logging.getLogger("aiakq.server")

#: For one request: maximum number of checks of single tools or groups of them, and of seconds that they compute.
MAX_CHECKS, MAX_CHECK_SECONDS = 32, 2.0
#: Maximum number of warnings that are remembered, to log each once.
_MAX_WARNINGS = 512


def parameters_name(number: int) -> str:
    """Return the request field of the argument schema of a tool."""
    return f"tools[{number}].function.parameters"


def arguments_schema(number: int, tool: Tool) -> dict[str, object]:
    """Return the JSON schema of the arguments of ``tool``: an object, in keywords that grammars can enforce.

    If the tool is not strict, what cannot be enforced is dropped, and the log says so.

    Raises ``value_out_of_range`` and, if the tool is strict, ``grammar_not_enforceable``.
    """
    schema, param = tool.function.parameters or {}, parameters_name(number)
    types = schema.get("type")
    if types is not None and "object" not in (types if isinstance(types, list) else [types]):
        allowed = "the schema of an object"
        raise error("value_out_of_range", param=param, value=f"type {types}"[:64], allowed=allowed)
    if not schema:
        return dict(NO_ARGUMENTS)
    text = json_text(param, schema)
    try:
        cleaned, dropped = clean_arguments(text, bool(tool.function.strict))
    except AiakqError as failure:
        if failure.id != "grammar_not_enforceable":
            raise
        raise error("grammar_not_enforceable", param=param, reason=failure.fields["reason"]) from None
    warn(tool.function.name, dropped)
    return cleaned


@lru_cache(_MAX_WARNINGS)
def _warn(name: str, note: str) -> None:
    logger.warning("The schema of the tool %s is enforced in part: %s", ascii(name[:64]), ascii(note[:200])[1:-1])


def warn(name: str, dropped: Sequence[str]) -> None:
    """Log what is not enforced of the schema of a tool, once while it is in use."""
    if dropped:
        _warn(name, "; ".join(dropped[:5]))


def writable_schemas(
    tools: Sequence[tuple[int, Tool]], schemas: dict[str, Any], has_grammar: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return ``schemas`` with those loosened that a format of calls cannot enforce: of tools that are not strict.

    has_grammar  whether the format has a grammar for tools with these schemas.
    """
    found = dict(schemas)
    for _, tool in tools:
        name = tool.function.name
        if not tool.function.strict and not has_grammar({name: found[name]}):
            loosest, dropped = loosest_schema(found[name])
            if has_grammar({name: loosest}):
                found[name] = loosest
                warn(name, dropped)
    return found


class ToolSchemaChecks:
    """Checks which schemas of ``tools`` can be enforced, within the limits above for all together.

    check  checks whether the schemas of some tools can be enforced together.
    relax  makes the schema of one tool enforceable, in its ``text``; ``dropped`` says what is not enforced then.
    """

    def __init__(
        self,
        tools: Sequence[tuple[int, Tool]],
        check: Callable[[Sequence[object]], Awaitable[TextReply]],
        relax: Callable[[object], Awaitable[TextReply]],
    ) -> None:
        self._tools, self._check, self._relax = tools, check, relax
        self._num_checks, self._seconds = 0, 0.0

    async def enforceable(self, schemas: dict[str, Any]) -> dict[str, object]:
        """Return ``schemas`` with those relaxed that cannot be enforced.

        Raises ``grammar_not_enforceable`` if such a schema is of a strict tool.
        """
        found = dict(schemas)
        pending = [list(self._tools)]
        while pending:
            group = pending.pop()
            if self._is_exhausted():
                self._loosen(group, found)
            elif len(group) == 1:
                await self._single(*group[0], found)
            elif (await self._counted(self._check([found[tool.function.name] for _, tool in group]))).failure:
                middle = len(group) // 2
                pending += [group[middle:], group[:middle]]
        return found

    def loosest(self, schemas: dict[str, object]) -> dict[str, object]:
        """Return ``schemas`` with those of tools that are not strict in their loosest form."""
        found = dict(schemas)
        self._loosen(self._tools, found)
        return found

    async def _single(self, number: int, tool: Tool, found: dict[str, object]) -> None:
        name = tool.function.name
        if tool.function.strict:
            reply = await self._counted(self._check([found[name]]))
            if reply.failure:
                raise error("grammar_not_enforceable", param=parameters_name(number), reason=reply.failure)
            return
        reply = await self._counted(self._relax(found[name]))
        if reply.failure:
            self._loosen([(number, tool)], found)
        else:
            found[name] = json.loads(reply.text)
            warn(name, reply.dropped)

    def _loosen(self, tools: Sequence[tuple[int, Tool]], found: dict[str, Any]) -> None:
        for _, tool in tools:
            if not tool.function.strict:
                name = tool.function.name
                found[name], dropped = loosest_schema(found[name])
                warn(name, dropped)

    def _is_exhausted(self) -> bool:
        return self._num_checks >= MAX_CHECKS or self._seconds >= MAX_CHECK_SECONDS

    async def _counted(self, reply: Awaitable[TextReply]) -> TextReply:
        self._num_checks += 1
        result = await reply
        self._seconds += result.seconds
        return result
