"""Names of the field of a tool with the JSON schema of its arguments, in several APIs and protocols."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.errors import error

#: Those of OpenAI, Anthropic, the Model Context Protocol and Gemini.
SCHEMA_NAMES = (
    *("parameters", "input_schema", "inputSchema"),
    *("parametersJsonSchema", "parameters_json_schema"),
)
#: Fields with the schema of a result, which is not enforced.
_RESULTS = frozenset(
    {
        *("response", "response_schema", "responseSchema", "responseJsonSchema", "response_json_schema"),
        *("returns", "return", "result", "output", "output_schema", "outputSchema"),
    }
)
#: Names that say the same as ``parameters``, with values in forms that differ.
_SIMILAR = frozenset(
    {
        *("params", "param", "args", "arguments", "args_schema", "argsSchema", "args_json_schema", "input", "inputs"),
        *("schema", "json_schema", "jsonSchema", "properties", "required"),
    }
)


def renamed_schema(tool: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return ``tool`` with its only schema in the field ``name``, at the place where it is; else ``tool`` itself."""
    found = [each for each in SCHEMA_NAMES if tool.get(each) is not None]
    if len(found) != 1 or found == [name]:
        return tool
    kept = {key: value for key, value in tool.items() if key != name}
    return {name if key == found[0] else key: value for key, value in kept.items()}


def check_schema_names(tool: Mapping[str, object], path: str, schema: Mapping[str, object] | None) -> None:
    """Raise ``unsupported_parameter`` for a schema of arguments that would not be enforced.

    tool    the fields of the tool that are not read.
    schema  the schema that is enforced, or None.
    """
    for name, value in tool.items():
        if not value:
            continue
        param = f"{path}.{name:.64}"
        if name in SCHEMA_NAMES and value != schema:
            if schema is not None:
                raise error("unsupported_parameter", param=param, reason="another schema of the arguments is given too")
            raise error("unsupported_parameter", param=param, reason="a JSON schema of an object is expected")
        if not (schema or {}).get("properties") and (name in _SIMILAR or (name not in _RESULTS and _is_schema(value))):
            raise error("unsupported_parameter", param=param, reason="the schema of the arguments is named parameters")


def _is_schema(value: object) -> bool:
    """Whether a value looks like the JSON schema of an object."""
    return isinstance(value, dict) and (value.get("type") == "object" or isinstance(value.get("properties"), dict))
