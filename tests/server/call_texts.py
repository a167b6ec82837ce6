"""Tools, and calls of them as each family of models writes them."""

from __future__ import annotations

import json
from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "free": {},
    },
}
TOOLS = {"get_weather": PARAMETERS, "get_time": {"type": "object", "properties": {}}}

SIMPLE = {"city": "Tokyo"}
TYPES = {
    "city": "Bergen",
    "days": 3,
    "ratio": -0.5,
    "metric": True,
    "tags": ["a", 1, None, {"b": []}],
    "where": {"at": {"x": [[1], [2]]}, "empty": {}},
    "note": None,
}
ESCAPED = {"city": 'a "b" \\ c\n\t{"d": ["}"]} é 🙂 <b>'}


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def as_tags(name: str, arguments: dict[str, Any]) -> str:
    """Qwen3-Coder's form."""
    values = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def as_pairs(name: str, arguments: dict[str, Any], between: str = "\n") -> str:
    """GLM's form."""
    values = [
        f"<arg_key>{key}</arg_key>{between}"
        f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>{between}"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{between}{''.join(values)}</tool_call>"


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>"


def kimi(name: str, arguments: dict[str, Any], number: int = 0) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{body}<|tool_call_end|>"


LLAMA = json.dumps({"name": "get_weather", "parameters": SIMPLE})

#: Calls -> the text of them all, as each family writes it.
WRITERS: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(as_json(*call, key="parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(as_json(*call) for call in calls)}]",
    "pythonic": lambda calls: f"[{', '.join(as_python(*call) for call in calls)}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(as_python(*call) for call in calls)}]<|python_end|>",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(as_json(*call) for call in calls)}]",
    "granite-20b-fc": lambda calls: "".join(f"<function_call> {as_json(*call)}" for call in calls),
    "internlm": lambda calls: "\n".join(
        f"<|action_start|><|plugin|>\n{as_json(*call, key='parameters')}<|action_end|>" for call in calls
    ),
    "jamba": lambda calls: f"<tool_calls>[\n{', '.join(as_json(*call) for call in calls)}\n]</tool_calls>",
    "phi4_mini_json": lambda calls: f"functools[{', '.join(as_json(*call) for call in calls)}]",
    "qwen3_coder": lambda calls: "\n".join(as_tags(*call) for call in calls),
    "glm45": lambda calls: "\n".join(as_pairs(*call) for call in calls),
    "glm47": lambda calls: "".join(as_pairs(*call, between="") for call in calls),
    "deepseek_v3": lambda calls: (
        f"<｜tool▁calls▁begin｜>{chr(10).join(deepseek(*call) for call in calls)}<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(kimi(*call, number) for number, call in enumerate(calls))
        + "<|tool_calls_section_end|>"
    ),
}
WRITERS["llama4_json"] = WRITERS["llama3_json"]
WRITERS["qwen3_xml"] = WRITERS["qwen3_coder"]
WRITERS["qwen3_json"] = WRITERS["hermes"]
#: Formats whose calls are the beginning of the message.
WITHOUT_MARK = {"llama3_json", "llama4_json", "pythonic"}
