"""Convert tools and tool choice of a /v1/responses request to the chat format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiakq.errors import error
from aiakq.runtime.text.message_parts import string_of, type_of
from aiakq.server.api.part_fields import check_choice, check_fields, fields, objects_of
from aiakq.server.api.unknown_fields import UnknownFields

#: OpenAI's server-side tools, which agents send to any server. They are omitted from the prompt.
LEFT_OUT = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})


_FUNCTION = fields("name description parameters strict defer_loading allowed_callers output_schema")
_NAMESPACE = fields("name description tools")


def check_tools(tools: list[object] | None, choice: object, unknown: UnknownFields) -> None:
    """Call ``check_fields`` for functions, namespaces of them and ``tool_choice``. Raises ``unknown_field``.

    Other fields of functions are passed to the chat template.
    """
    for tool, path in objects_of(tools, "tools"):
        if tool.get("type") == "function":
            check_fields(tool, path, _FUNCTION, unknown, passes_on=True)
        elif tool.get("type") == "namespace":
            check_fields(tool, path, _NAMESPACE, unknown)
            for member, member_path in objects_of(tool.get("tools"), f"{path}.tools"):
                check_fields(member, member_path, _FUNCTION, unknown, passes_on=True)
    check_choice(choice, unknown)


def flat_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees the tool ``name`` of a namespace."""
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


class OfferedTools:
    """The tools that the model may call.

    tools        the tools in the format of chat completions.
    choice       ``tool_choice`` of chat completions.
    paths        path of each tool in the request, for error messages.
    members      tool name used by the model -> (namespace, name), for tools inside a namespace.
    definitions  definitions of the tools as sent, without omitted ones.
    """

    def __init__(self, tools: list[Any] | None, choice: Any) -> None:
        """Raises ``unsupported_parameter``, ``invalid_type``, ``missing_field`` and ``value_out_of_range``."""
        self.tools: list[dict[str, Any]] = []
        self.choice: object = None
        self.paths: list[str] = []
        self.members: dict[str, tuple[str, str]] = {}
        self.definitions: list[object] = []
        for number, tool in enumerate(tools or ()):
            path = f"tools[{number}]"
            kind = type_of(tool, path)
            if kind in LEFT_OUT:
                continue
            self.definitions.append(tool)
            if kind == "namespace":
                self._add_namespace(tool, path)
            else:
                self._add(tool, kind, path, None)
        self._choose(choice)

    def _add_namespace(self, tool: dict[str, object], path: str) -> None:
        namespace = string_of(tool, "name", path)
        tools = tool.get("tools")
        if not isinstance(tools, list):
            raise error("invalid_type", param=f"{path}.tools", reason="a list of functions is expected")
        for number, member in enumerate(tools):
            tool_path = f"{path}.tools[{number}]"
            self._add(member, type_of(member, tool_path), tool_path, namespace)

    def _add(self, tool: dict[str, Any], kind: str, path: str, namespace: str | None) -> None:
        if kind != "function":
            reason = f"{kind:.64}: only functions are called, and those of a namespace"
            raise error("unsupported_parameter", param=f"{path}.type", reason=reason)
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tool_name = string_of(tool, "name", path)
        if namespace is not None:
            function["name"] = flat_name(namespace, tool_name)
            self.members[function["name"]] = (namespace, tool_name)
        self.tools.append({"type": "function", "function": function})
        self.paths.append(path)

    def _choose(self, choice: Any) -> None:
        """Set ``choice``; ``allowed_tools`` removes all other tools."""
        if choice is None or isinstance(choice, str):
            self.choice = choice
            return
        kind = type_of(choice, "tool_choice")
        if kind == "function":
            self.choice = {"type": "function", "function": {"name": self._name_of(choice, "tool_choice")}}
        elif kind == "allowed_tools":
            self._allow(choice)
        else:
            reason = f"{kind:.64}: only functions are called"
            raise error("unsupported_parameter", param="tool_choice.type", reason=reason)

    def _name_of(self, choice: dict[str, object], path: str) -> str:
        name = string_of(choice, "name", path)
        if choice.get("namespace") is not None:
            return flat_name(string_of(choice, "namespace", path), name)
        return name

    def _allow(self, choice: dict[str, object]) -> None:
        self.choice = string_of(choice, "mode", "tool_choice")
        if self.choice not in ("auto", "required"):
            value = self.choice[:64]
            raise error("value_out_of_range", param="tool_choice.mode", value=value, allowed="auto or required")
        names = set(self._allowed_names(choice.get("tools")))
        indices = [number for number, tool in enumerate(self.tools) if tool["function"]["name"] in names]
        if len(indices) < len(names):
            known = {tool["function"]["name"] for tool in self.tools}
            unknown = min(names - known, default="")
            allowed = "the name of one of the tools"
            raise error("value_out_of_range", param="tool_choice.tools", value=unknown[:64], allowed=allowed)
        self.tools = [self.tools[number] for number in indices]
        self.paths = [self.paths[number] for number in indices]

    def _allowed_names(self, tools: object) -> Iterator[str]:
        if not isinstance(tools, list):
            raise error("invalid_type", param="tool_choice.tools", reason="a list of functions is expected")
        for number, tool in enumerate(tools):
            path = f"tool_choice.tools[{number}]"
            kind = type_of(tool, path)
            if kind == "function":
                yield self._name_of(tool, path)
            elif kind not in LEFT_OUT:
                reason = f"{kind:.64}: only functions are called"
                raise error("unsupported_parameter", param=f"{path}.type", reason=reason)
