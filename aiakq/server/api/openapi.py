"""The OpenAPI document, built from the table of routes and their request models, response models and errors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

import aiakq
from aiakq.errors import REGISTRY
from aiakq.runtime.engine.messages import ModelLimits
from aiakq.server.api.request_model import LIMITED_BY, RequestModel
from aiakq.server.api.routes import Route
from aiakq.server.api.service import ModelInfo

Schema = dict[str, Any]

#: Errors of every route, and of every route that reads a body.
COMMON_ERRORS = (
    *("invalid_http", "headers_too_large", "read_timeout", "host_not_allowed", "origin_not_allowed"),
    *("too_many_connections", "loading", "request_failed"),
)
BODY_ERRORS = (
    *("invalid_json", "duplicate_key", "invalid_type", "missing_field", "value_out_of_range", "unknown_field"),
    *("unsupported_parameter", "unknown_model", "request_too_large", "unsupported_encoding", "unsupported_media_type"),
)
KEY_ERRORS = ("invalid_api_key",)

_COMPONENTS = "#/components/schemas/"


def openapi_document(routes: Sequence[Route], model: ModelInfo, keyless_paths: frozenset[str] | None) -> Schema:
    """The document for ``routes``. ``keyless_paths`` need no key; None if the server requires no keys at all."""
    response_types: set[Any] = {route.error_body for route in routes}
    response_types |= {route.response for route in routes if isinstance(route.response, type)}
    references, schemas = response_schemas(response_types)
    paths: Schema = {}
    for route in routes:
        needs_key = keyless_paths is not None and route.path not in keyless_paths
        paths[route.openapi_path] = {
            method.lower(): _operation(route, method.lower(), model, references, needs_key) for method in route.methods
        }
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "aiakq", "version": aiakq.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keyless_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(route: Route, method: str, model: ModelInfo, references: dict[Any, Schema], needs_key: bool) -> Schema:
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
    if route.request:
        bodies = [resolve_limits(request_schema(request), model) for request in route.request]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


# --- requests ---------------------------------------------------------------------------------------------------------


def request_schema(model: type[RequestModel]) -> Schema:
    """The JSON schema of a request body, without references; bounds of the loaded model are still ``LIMITED_BY``."""
    schema = model.model_json_schema(ref_template=_COMPONENTS + "{model}")
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if isinstance(node.get("$ref"), str):
            definition = definitions[node["$ref"].removeprefix(_COMPONENTS)]
            return inline({**definition, **{name: value for name, value in node.items() if name != "$ref"}})
        return {name: inline(value) for name, value in node.items()}

    return inline(schema)


def _token_id(model: ModelInfo) -> Schema:
    return {"minimum": 0, "maximum": model.limits.vocab_size - 1}


def _max_tokens(model: ModelInfo) -> Schema:
    limits = model.limits
    # With a limit of the model's own, larger values are accepted and cut to it.
    return {"minimum": 0, **({"maximum": limits.max_model_len - 1} if limits.max_new_tokens is None else {})}


def _logprobs(model: ModelInfo) -> Schema:
    limits: ModelLimits = model.limits
    return {"minimum": -1 if limits.vocab_size <= limits.max_logprobs else 0, "maximum": limits.max_logprobs}


def _priority(model: ModelInfo) -> Schema:
    return {"minimum": -(2**31), "maximum": 2**31 - 1} if model.limits.by_priority else {"const": 0}


def _model_name(model: ModelInfo) -> Schema:
    return {"enum": list(model.names)}


#: What ``LIMITED_BY`` stands for.
_LIMITS: dict[str, Callable[[ModelInfo], Schema]] = {
    "token_id": _token_id,
    "max_tokens": _max_tokens,
    "logprobs": _logprobs,
    "priority": _priority,
    "model": _model_name,
}


def resolve_limits(node: Any, model: ModelInfo) -> Any:
    """``node`` with the bounds of ``model`` in the place of ``LIMITED_BY``."""
    if isinstance(node, list):
        return [resolve_limits(entry, model) for entry in node]
    if not isinstance(node, dict):
        return node
    resolved = {name: resolve_limits(value, model) for name, value in node.items() if name != LIMITED_BY}
    return {**resolved, **_LIMITS[node[LIMITED_BY]](model)} if LIMITED_BY in node else resolved


# --- responses --------------------------------------------------------------------------------------------------------


def response_schemas(types: Iterable[Any]) -> tuple[dict[Any, Schema], Schema]:
    """Type -> reference to its schema, and all schemas by name, of response models."""
    ordered = sorted(types, key=lambda type_: type_.__name__)
    references, schemas = msgspec.json.schema_components(ordered, ref_template=_COMPONENTS + "{name}")
    for schema in schemas.values():
        if schema.get("type") == "object" and "properties" in schema:
            schema["additionalProperties"] = False
            # A field with a default is in every response; only one that may be unset is optional.
            schema["required"] = [
                name
                for name in schema["properties"]
                if name in schema["required"] or "default" in schema["properties"][name]
            ]
    return dict(zip(ordered, references, strict=True)), schemas


def _success(route: Route, references: dict[Any, Schema]) -> Schema:
    content: Schema = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": {"type": "string"}}
    elif route.response is not None:
        content["application/json"] = {"schema": references[route.response]}
    if route.streams:
        data = {"type": "object", "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": data}
    return {"description": route.description, **({"content": content} if content else {})}


def _error_responses(route: Route, references: dict[Any, Schema], needs_key: bool) -> Schema:
    """Status -> the errors of the route that have it."""
    by_status: dict[str, list[str]] = defaultdict(list)
    for id in error_ids(route, needs_key):
        by_status[str(REGISTRY[id].http_status)].append(id)
    content = {"application/json": {"schema": references[route.error_body]}}
    return {status: {"description": ", ".join(ids), "content": content} for status, ids in sorted(by_status.items())}


def error_ids(route: Route, needs_key: bool) -> tuple[str, ...]:
    """The ids of all errors a route can return."""
    body = BODY_ERRORS if route.request else ()
    return tuple(dict.fromkeys((*COMMON_ERRORS, *body, *route.errors, *(KEY_ERRORS if needs_key else ()))))
