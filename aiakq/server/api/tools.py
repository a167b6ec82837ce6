"""Request fields for tools: their definitions, and whether the model may call them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, WithJsonSchema, model_validator

from aiakq.errors import error
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.request_model import FailFastList, RequestModel
from aiakq.server.api.schema_names import SCHEMA_NAMES, check_schema_names, renamed_schema

#: Maximum number of tools in a request.
MAX_TOOLS = 1024

_CHOICE_SCHEMA = {
    "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}],
    "description": "none: no tool is called, and the prompt names none. auto, the default: the model decides. "
    "required: at least one is called. An object with type and function: the tool of this name is called. An object of "
    "type allowed_tools: the mode auto or required, among the tools that it names.",
}
ToolChoice = Annotated[object, WithJsonSchema(_CHOICE_SCHEMA)]


class AsSent(RequestModel):
    """An object that is passed to chat templates with its keys and their order as the client sent them."""

    open = True
    passes_on = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    _sent: dict[str, object] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict):
            value = cls._in_own_names(value)
        model = handler(cls._completed(value) if isinstance(value, dict) else value)
        if isinstance(value, dict):
            model._sent = value
        return model

    @classmethod
    def _in_own_names(cls, value: dict[str, object]) -> dict[str, object]:
        """Return the object with names of other APIs replaced."""
        return value

    @classmethod
    def _completed(cls, value: dict[str, object]) -> dict[str, object]:
        """Return the object to validate."""
        return value

    @property
    def as_sent(self) -> dict[str, object]:
        return self._sent


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
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _OtherTool(ToolFunction):
    """What stands for the function of a tool of another type, which is refused by ``check_tools``."""

    name: str = ""


class Tool(AsSent):
    """A tool. Only functions are supported."""

    type: Annotated[str, WithJsonSchema({"const": "function"})]
    function: ToolFunction

    #: Position in the request, for error messages.
    _number: int = PrivateAttr(0)

    @classmethod
    def _in_own_names(cls, value: dict[str, object]) -> dict[str, object]:
        function = value.get("function")
        if not isinstance(function, dict):
            return value
        named = renamed_schema(function, "parameters")
        beside = renamed_schema({name: each for name, each in value.items() if name in SCHEMA_NAMES}, "parameters")
        moved = {"parameters": beside.get("parameters"), "strict": value.get("strict")}
        if any(named.get(name) is not None for name in SCHEMA_NAMES):
            del moved["parameters"]
        moved = {name: each for name, each in moved.items() if each is not None and named.get(name) is None}
        if not moved:
            return value if named is function else value | {"function": named}
        rest = {name: each for name, each in value.items() if not (name in SCHEMA_NAMES and "parameters" in moved)}
        if "strict" in moved:
            del rest["strict"]
        return rest | {"function": {**named, **moved}}

    @classmethod
    def _completed(cls, value: dict[str, object]) -> dict[str, object]:
        is_other = isinstance(value.get("type"), str) and value["type"] != "function"
        return value | {"function": _OtherTool()} if is_other else value

    @property
    def number(self) -> int:
        return self._number


Tools = Annotated[FailFastList[Tool], Field(max_length=MAX_TOOLS)]


def tool_schemas(tools: Sequence[Tool] | None) -> dict[str, Mapping[str, object]]:
    """Return tool name -> JSON schema of its arguments."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools or ()}


def check_tools(tools: Sequence[Tool] | None, choice: object) -> None:
    """Raise an error for tools or a ``tool_choice`` that cannot be followed, or that contradict each other."""
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        path = f"tools[{number}]"
        tool._number = number
        if tool.type != "function":
            reason = f"{tool.type:.64}: only tools of type function are called"
            raise error("unsupported_parameter", param=f"{path}.type", reason=reason)
        if tool.function.name in names:
            allowed, value = "a name that no other tool has", tool.function.name[:64]
            raise error("value_out_of_range", param=f"{path}.function.name", value=value, allowed=allowed)
        names.add(tool.function.name)
        _check_schema(tool, path)
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
    _check_type(choice, ("function", "allowed_tools"), "tool_choice")
    if choice.get("type") != "allowed_tools":
        _check_name(choice, names, "tool_choice")


def _check_schema(tool: Tool, path: str) -> None:
    """Raise ``unsupported_parameter`` for a schema or ``strict`` in a field that is not read."""
    function = tool.function
    check_schema_names(function.model_extra or {}, f"{path}.function", function.parameters)
    beside = tool.model_extra or {}
    check_schema_names(beside, path, function.parameters)
    strict = beside.get("strict")
    if strict is not None and strict != function.strict:
        raise error("unsupported_parameter", param=f"{path}.strict", reason="function.strict has another value")


def allowed_tools(tools: list[Tool] | None, choice: object) -> tuple[list[Tool] | None, object]:
    """Return the tools that ``tool_choice`` allows, and the choice among them, which is the mode of allowed_tools.

    Raises ``missing_field``, ``invalid_type``, ``value_out_of_range`` and ``unsupported_parameter``.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    path = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if allowed is None:
        raise error("missing_field", param=path)
    if not isinstance(allowed, dict):
        raise error("invalid_type", param=path, reason="an object with mode and tools is expected")
    mode, entries = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        value = str(mode)[:64]
        raise error("value_out_of_range", param=f"{path}.mode", value=value, allowed="auto or required")
    if not isinstance(entries, list) or not entries:
        raise error("invalid_type", param=f"{path}.tools", reason="a list of functions is expected")
    known = {tool.function.name for tool in tools or ()}
    names = set()
    for number, entry in enumerate(entries):
        entry_path = f"{path}.tools[{number}]"
        if not isinstance(entry, dict):
            raise error("invalid_type", param=entry_path, reason="an object with type and function is expected")
        _check_type(entry, ("function",), entry_path)
        names.add(_check_name(entry, known, entry_path))
    return [tool for tool in tools or () if tool.function.name in names], mode


def _check_type(choice: dict[str, object], known: tuple[str, ...], path: str) -> None:
    kind = choice.get("type", "function")
    if not isinstance(kind, str):
        raise error("invalid_type", param=f"{path}.type", reason="a string is expected")
    if kind not in known:
        reason = f"{kind:.64}: only tools of type function are called"
        raise error("unsupported_parameter", param=f"{path}.type", reason=reason)


def _check_name(choice: dict[str, object], known: Collection[str], path: str) -> str:
    """Return the name of the chosen function. Raises ``missing_field`` and ``value_out_of_range``."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise error("missing_field", param=f"{path}.function.name")
    if name not in known:
        allowed = "the name of one of the tools"
        raise error("value_out_of_range", param=f"{path}.function.name", value=name[:64], allowed=allowed)
    return name


def calls_tools(tools: Sequence[Tool] | None, choice: object) -> bool:
    """Whether the model may call tools, which are then in the prompt."""
    return bool(tools) and choice != "none"


def forced_tools(tools: Sequence[Tool] | None, choice: object) -> Sequence[Tool] | None:
    """Return the tools of which one must be called, or None if the model decides."""
    if choice == "required":
        return tools
    if isinstance(choice, Mapping):
        return [tool for tool in tools or () if tool.function.name == choice["function"]["name"]]
    return None
