"""Request fields for tools: their definitions, and whether the model may call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from aiakq.errors import error
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.request_model import FailFastList, RequestModel

#: Maximum number of tools in a request.
MAX_TOOLS = 1024

_CHOICE_SCHEMA = {
    "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}],
    "description": "none: no tool is called, and the prompt names none. auto, the default: the model decides. "
    "required: at least one is called. An object with type and function: the tool of this name is called.",
}
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]


class ToolFunction(RequestModel):
    """A function that the model may call.

    parameters  JSON schema of its arguments.
    strict      reject the request if the schema cannot be enforced.
    """

    open = True
    passes_on = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool. Only functions are supported."""

    open = True
    passes_on = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    type: Annotated[str, WithJsonSchema({"const": "function"})]
    function: ToolFunction

    def to_dict(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, always with description and parameters, which many need."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


Tools = Annotated[FailFastList[Tool], Field(max_length=MAX_TOOLS)]


def tool_schemas(tools: Sequence[Tool] | None) -> dict[str, Mapping[str, Any]]:
    """Return tool name -> JSON schema of its arguments."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools or ()}


def check_tools(tools: Sequence[Tool] | None, choice: Any) -> None:
    """Raise ``unsupported_parameter``, ``missing_field``, ``invalid_type`` or ``value_out_of_range``."""
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        path = f"tools[{number}]"
        if tool.type != "function":
            raise error("unsupported_parameter", param=f"{path}.type", reason="only tools of type function are called")
        if tool.function.name in names:
            allowed, value = "a name that no other tool has", tool.function.name[:64]
            raise error("value_out_of_range", param=f"{path}.function.name", value=value, allowed=allowed)
        names.add(tool.function.name)
    if choice is None or choice in ("none", "auto"):
        return
    if choice == "required":
        if not tools:
            raise error("missing_field", param="tools")
        return
    if not isinstance(choice, dict):
        expected = "none, auto, required, or an object with type and function"
        if isinstance(choice, str):
            raise error("value_out_of_range", param="tool_choice", value=choice[:64], allowed=expected)
        raise error("invalid_type", param="tool_choice", reason=f"{expected} is expected")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise error("missing_field", param="tool_choice.function.name")
    if name not in tool_schemas(tools):
        allowed = "the name of one of the tools"
        raise error("value_out_of_range", param="tool_choice.function.name", value=name[:64], allowed=allowed)


def calls_tools(tools: Sequence[Tool] | None, choice: Any) -> bool:
    """Whether the model may call tools, which are then in the prompt."""
    return bool(tools) and choice != "none"


def forced_tools(tools: Sequence[Tool] | None, choice: Any) -> Sequence[Tool] | None:
    """Return the tools of which one must be called, or None if the model decides."""
    if choice == "required":
        return tools
    if isinstance(choice, Mapping):
        return [tool for tool in tools or () if tool.function.name == choice["function"]["name"]]
    return None
