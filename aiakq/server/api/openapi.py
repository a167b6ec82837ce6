"""Generate the OpenAPI document from the routes, their models and their errors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

import aiakq
from aiakq.constraints import LIMITED_BY
from aiakq.errors import REGISTRY
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import PRIORITY
from aiakq.server.api.model_info import ModelInfo
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.routes import Route
from aiakq.server.api.unsupported_fields import UNSUPPORTED_FIELDS

Schema = dict[str, Any]

#: Errors of every route, and of every route that reads a request body.
COMMON_ERRORS = (
    *("invalid_http", "headers_too_large", "read_timeout", "host_not_allowed", "origin_not_allowed"),
    *("too_many_connections", "loading", "request_failed"),
)
BODY_ERRORS = (
    *("invalid_json", "duplicate_key", "invalid_type", "missing_field", "value_out_of_range", "unknown_field"),
    *("unsupported_parameter", "unknown_model", "request_too_large", "bodies_too_large", "unsupported_encoding"),
    "unsupported_media_type",
)
KEY_ERRORS = ("invalid_api_key",)
ADMIN_ERRORS = ("admin_key_required",)

_COMPONENTS = "#/components/schemas/"


def openapi_document(
    routes: Sequence[Route], model: ModelInfo, keyless_paths: frozenset[str] | None, unknown_fields: bool = False
) -> Schema:
    """Return the document for ``routes``.

    keyless_paths   paths that need no key; None if the server requires no keys.
    unknown_fields  whether requests may have unknown fields.
    """
    response_types: set[object] = {route.error_body for route in routes}
    response_types |= {
        type_ for route in routes for type_ in (route.response, *_streamed(route)) if isinstance(type_, type)
    }
    references, schemas = response_schemas(response_types)
    paths: Schema = {}
    for route in routes:
        needs_key = keyless_paths is not None and route.path not in keyless_paths
        paths[route.openapi_path] = {
            method.lower(): _operation(route, method.lower(), model, references, needs_key) for method in route.methods
        }
        if unknown_fields and (route.request or route.form is not None):
            for operation in paths[route.openapi_path].values():
                _allow_unknown_fields(operation["requestBody"])
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "aiakq", "version": aiakq.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keyless_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(
    route: Route, method: str, model: ModelInfo, references: dict[object, Schema], needs_key: bool
) -> Schema:
    operation: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method}_{route.openapi_path.strip('/')}").strip("_"),
        "summary": route.summary,
        "tags": [route.tag],
        "responses": {"200": _success(route, references), **_error_responses(route, references, needs_key)},
    }
    parameters = re.findall(r"\{(\w+)\}", route.openapi_path)
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    if needs_key:
        operation["security"] = [{"key": []}]
    if route.form is not None:
        schema = resolve_limits(request_schema(route.form), model)
        schema["properties"]["file"] = {"description": "The file.", "type": "string", "contentMediaType": "audio/*"}
        schema["required"] = ["file"]
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if route.request:
        bodies = [resolve_limits(request_schema(request), model) for request in route.request]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _allow_unknown_fields(node: object) -> None:
    """Allow additional properties, and any value of hint fields, in every object schema below ``node``."""
    if isinstance(node, list):
        for entry in node:
            _allow_unknown_fields(entry)
    elif isinstance(node, dict):
        if node.get("additionalProperties") is False:
            node["additionalProperties"] = True
            for name, field in UNSUPPORTED_FIELDS.items():
                described = node["properties"].get(name, {}).get("description", "")
                if field.hint and described.startswith("Nothing else"):
                    node["properties"][name] = {"description": "Without effect."}
        for entry in node.values():
            _allow_unknown_fields(entry)


# --- requests ---------------------------------------------------------------------------------------------------------


def request_schema(model: type[RequestModel]) -> Schema:
    """Return the JSON schema of a request body, with references resolved and ``LIMITED_BY`` for model limits."""
    schema = model.model_json_schema(ref_template=_COMPONENTS + "{model}")
    definitions = schema.pop("$defs", {})

    def inline(node: object) -> Any:
        if isinstance(node, list):
            return [inline(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if isinstance(node.get("$ref"), str):
            definition = definitions[node["$ref"].removeprefix(_COMPONENTS)]
            return inline({**definition, **{name: value for name, value in node.items() if name != "$ref"}})
        return {name: inline(value) for name, value in node.items()}

    inlined: Schema = inline(schema)
    return inlined


def _token_id(model: ModelInfo) -> Schema:
    return {"minimum": 0, "maximum": model.limits.vocab_size - 1}


def _max_tokens(model: ModelInfo) -> Schema:
    limits = model.limits
    # If the model has its own limit, larger values are accepted and clamped to it.
    return {"minimum": 0, **({"maximum": limits.max_model_len - 1} if limits.max_new_tokens is None else {})}


def _logprobs(model: ModelInfo) -> Schema:
    limits: ModelLimits = model.limits
    return {"minimum": -1 if limits.vocab_size <= limits.max_logprobs else 0, "maximum": limits.max_logprobs}


def _priority(model: ModelInfo) -> Schema:
    return PRIORITY.schema() if model.limits.by_priority else {"const": 0}


def _model_name(model: ModelInfo) -> Schema:
    return {"enum": list(model.names)}


#: Value of ``LIMITED_BY`` -> attribute of the model's limits.
_LIMITS: dict[str, Callable[[ModelInfo], Schema]] = {
    "token_id": _token_id,
    "max_tokens": _max_tokens,
    "logprobs": _logprobs,
    "priority": _priority,
    "model": _model_name,
}


def resolve_limits(node: object, model: ModelInfo) -> Any:
    """Return ``node`` with ``LIMITED_BY`` replaced by the limits of ``model``."""
    if isinstance(node, list):
        return [resolve_limits(entry, model) for entry in node]
    if not isinstance(node, dict):
        return node
    resolved = {name: resolve_limits(value, model) for name, value in node.items() if name != LIMITED_BY}
    return {**resolved, **_LIMITS[node[LIMITED_BY]](model)} if LIMITED_BY in node else resolved


# --- responses --------------------------------------------------------------------------------------------------------


def response_schemas(types: Iterable[Any]) -> tuple[dict[object, Schema], Schema]:
    """Return (type -> schema reference, schema name -> schema) of response models."""
    ordered = sorted(types, key=lambda type_: type_.__name__)
    references, schemas = msgspec.json.schema_components(ordered, ref_template=_COMPONENTS + "{name}")
    for schema in schemas.values():
        if schema.get("type") == "object" and "properties" in schema:
            schema["additionalProperties"] = False
            # Fields with defaults are in every response; only those that may be unset are optional.
            schema["required"] = [
                name
                for name in schema["properties"]
                if name in schema["required"] or "default" in schema["properties"][name]
            ]
    return dict(zip(ordered, references, strict=True)), schemas


def _success(route: Route, references: dict[object, Schema]) -> Schema:
    content: Schema = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": {"type": "object" if route.response == "application/json" else "string"}}
    elif route.response is not None:
        content["application/json"] = {"schema": references[route.response]}
    if route.streams:
        content["text/event-stream"] = {"schema": _event_schema(route, references)}
    return {"description": route.description, **({"content": content} if content else {})}


def _event_schema(route: Route, references: dict[object, Schema]) -> Schema:
    """Return the schema of a server-sent event, whose data is JSON: a chunk, or the error that ends the stream."""
    data: Schema = {"type": "string"}
    if events := _streamed(route):
        data["contentMediaType"] = "application/json"
        data["contentSchema"] = {"anyOf": [references[type_] for type_ in (*events, route.error_body)]}
    return {"type": "object", "properties": {"data": data}}


def _streamed(route: Route) -> tuple[type[object], ...]:
    """Return the types of the events of ``route``."""
    if isinstance(route.streams, tuple):
        return route.streams
    return (route.streams,) if isinstance(route.streams, type) else ()


def _error_responses(route: Route, references: dict[object, Schema], needs_key: bool) -> Schema:
    """Return status -> description of the errors of the route with this status."""
    by_status: dict[str, list[str]] = defaultdict(list)
    for id in error_ids(route, needs_key):
        by_status[str(REGISTRY[id].http_status)].append(id)
    content = {"application/json": {"schema": references[route.error_body]}}
    return {status: {"description": ", ".join(ids), "content": content} for status, ids in sorted(by_status.items())}


def error_ids(route: Route, needs_key: bool) -> tuple[str, ...]:
    """Return the ids of all errors that a route can return."""
    body = BODY_ERRORS if route.request or route.form is not None else ()
    keys = (*(ADMIN_ERRORS if route.administrates else ()), *(KEY_ERRORS if needs_key else ()))
    return tuple(dict.fromkeys((*COMMON_ERRORS, *body, *route.errors, *keys)))
