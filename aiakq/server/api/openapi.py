"""The API page's document: every field with its bounds, every answer with its shape, every error with its status.

FastAPI knows the routes; bodies are parsed from raw bytes and answers written as they are, so the rest is said here,
from the tables that the server itself goes by.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from aiakq.errors import REGISTRY
from aiakq.runtime.engine.messages import ModelLimits
from aiakq.runtime.sampling_params import (
    COUNT_RANGES,
    FLOAT_RANGES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    TOKEN_KEY,
)
from aiakq.server.api.parsing import REFUSED, STREAM_OPTIONS_WITHOUT_EFFECT, WITHOUT_EFFECT
from aiakq.server.api.protocol import (
    MESSAGE_WITHOUT_EFFECT,
    REFUSED_IN_MESSAGES,
    RESERVED_KWARGS,
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from aiakq.server.api.service import CHAT_COMPLETIONS, COMPLETIONS, GENERATING, Service

Schema = dict[str, Any]

_STRING, _INTEGER, _NUMBER, _BOOLEAN, _NULL = (
    {"type": kind} for kind in ("string", "integer", "number", "boolean", "null")
)

#: The errors every route has, those of routes that read a body, and those of routes that generate.
_ANYWHERE = (
    *("invalid_http", "headers_too_large", "read_timeout", "host_not_allowed", "origin_not_allowed"),
    *("too_many_connections", "loading", "request_failed"),
)
_WITH_BODY = (
    *("invalid_json", "duplicate_key", "invalid_type", "missing_field", "value_out_of_range", "unknown_field"),
    *("unsupported_parameter", "unknown_model", "request_too_large", "unsupported_encoding", "unsupported_media_type"),
)
_TEXT = ("no_tokenizer", "no_chat_template", "chat_template", "invalid_token_id")
_CLOSED = ("engine_dead", "engine_restarting", "shutting_down")
_GENERATING = (
    *("empty_prompt", "too_many_prompts", "context_length_exceeded", "nothing_left", "overloaded", "queue_timeout"),
    *("time_limit", "numerical_error", "engine_restarted", "engine_timeout", "request_quarantined", "aborted"),
    "slow_reader",
)
_ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, (*_WITH_BODY, *_TEXT, *_CLOSED, *_GENERATING)),
    "/tokenize": (*_WITH_BODY, *_TEXT),
    "/detokenize": (*_WITH_BODY, *_TEXT),
    "/v1/models/{name}": ("unknown_model",),
    **dict.fromkeys(("/health", "/ready", "/ping", "/reset_prefix_cache"), _CLOSED),
    "/abort_requests": _WITH_BODY,
}


def describe(app: FastAPI, service: Service, asks_for_key: bool, open_paths: Iterable[str]) -> None:
    """Make ``app`` say what it is. ``open_paths`` need no key."""
    plain, open_paths = app.openapi, frozenset(open_paths)

    def whole() -> Schema:
        if app.openapi_schema is None:
            with warnings.catch_warnings():
                # FastAPI names a route's operations once; they get names of their own below.
                warnings.filterwarnings("ignore", "Duplicate Operation ID")
                document = plain()
            app.openapi_schema = _completed(document, service, open_paths if asks_for_key else None)
        return app.openapi_schema

    app.openapi = whole  # type: ignore[method-assign]


def _completed(document: Schema, service: Service, open_paths: frozenset[str] | None) -> Schema:
    bodies, answers = _bodies(service), _answers()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method}_{path.strip('/').replace('/', '_')}".replace("{", "").replace("}", "")
            ids = [*_ANYWHERE, *_ERRORS.get(path, ())]
            if open_paths is not None and path not in open_paths:
                ids.append("invalid_api_key")
                operation["security"] = [{"key": []}]
            operation["responses"] = {
                "200": answers[path],
                **_refusals(ids, {"503": _NOT_READY} if path == "/ready" else {}),
            }
            if path in bodies:
                content = {"application/json": {"schema": bodies[path]}}
                operation["requestBody"] = {"required": path != "/abort_requests", "content": content}
    components: Schema = {"schemas": {"Error": _ERROR}}
    if open_paths is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["components"] = components
    return document


# --- what clients send ------------------------------------------------------------------------------------------------


def _bodies(service: Service) -> dict[str, Schema]:
    limits = service.limits
    tokenize = [_body(model, service) for model in (TokenizeRequest, TokenizeChatRequest)]
    bodies = {
        COMPLETIONS: _body(CompletionRequest, service),
        CHAT_COMPLETIONS: _body(ChatRequest, service),
        "/tokenize": {"anyOf": tokenize},
        "/detokenize": _body(DetokenizeRequest, service),
        "/abort_requests": _body(AbortRequest, service),
    }
    bodies["/detokenize"]["properties"]["tokens"]["items"] |= _token(limits)
    return bodies


def _body(model: type[BaseModel], service: Service) -> Schema:
    """A request body: pydantic's types, our bounds, and what is known beyond the declared fields."""
    schema = model.model_json_schema(ref_template="#/$defs/{model}")
    _inline(schema, schema.pop("$defs", {}))
    properties = schema["properties"]
    for name, bounds in _bounds(service.limits).items():
        if name in properties:
            _narrow(properties[name], bounds)
    if "model" in properties:
        _narrow(properties["model"], {"string": {"enum": list(service.names)}})
    if model is ChatRequest:
        _narrow(properties["top_logprobs"], {"integer": _logprobs(service.limits)})
    if "messages" in properties:
        _messages(properties)
    if "stream_options" in properties:
        options = next(one for one in properties["stream_options"]["anyOf"] if one.get("type") == "object")
        _close(options, STREAM_OPTIONS_WITHOUT_EFFECT, {})
    _close(schema, WITHOUT_EFFECT, REFUSED)
    return schema


def _bounds(limits: ModelLimits) -> dict[str, dict[str, Schema]]:
    """Field -> type -> what values of that type have to keep to."""
    text, token = {"minLength": 1, "maxLength": MAX_STOP_CHARS}, {**_INTEGER, **_token(limits)}
    bounds: dict[str, dict[str, Schema]] = {
        name: {"number": {"minimum" if closed else "exclusiveMinimum": low, "maximum": high}}
        for name, low, high, closed, _ in FLOAT_RANGES
    }
    bounds |= {name: {"integer": {"minimum": low, "maximum": high}} for name, low, high, _ in COUNT_RANGES}
    if limits.max_new_tokens is None:
        bounds["max_tokens"]["integer"]["maximum"] = limits.max_model_len - 1
    bounds["max_completion_tokens"] = bounds["max_tokens"]
    bounds["logprobs"] = bounds["prompt_logprobs"] = {"integer": _logprobs(limits)}
    bounds["truncate_prompt_tokens"]["integer"]["not"] = {"const": 0}
    bounds["priority"] = {
        "integer": {"minimum": -(2**31), "maximum": 2**31 - 1} if limits.by_priority else {"const": 0}
    }
    bounds["stop"] = {"string": text, "array": {"maxItems": MAX_STOP_STRINGS, "items": {**_STRING, **text}}}
    bounds["cache_salt"] = {"string": {"minLength": 1}}
    bounds["stop_token_ids"] = {"array": {"items": token}}
    bounds["allowed_token_ids"] = {"array": {"minItems": 1, "items": token}}
    bounds["bad_words"] = {"array": {"maxItems": MAX_BAD_WORDS, "items": {**_STRING, **text, "pattern": r"\S"}}}
    bounds["logit_bias"] = {
        "object": {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": TOKEN_KEY.pattern}}
    }
    bounds["prompt"] = {"array": {"minItems": 1}}
    return bounds


def _token(limits: ModelLimits) -> Schema:
    return {"minimum": 0, "maximum": limits.vocab_size - 1}


def _logprobs(limits: ModelLimits) -> Schema:
    whole = limits.vocab_size <= limits.max_logprobs
    return {"minimum": -1 if whole else 0, "maximum": limits.max_logprobs}


def _narrow(schema: Schema, bounds: Mapping[str, Schema]) -> None:
    """Add ``bounds`` to the branches of a field that are of their types."""
    for branch in schema.get("anyOf", [schema]):
        branch.update(bounds.get(branch.get("type", ""), {}))


def _messages(properties: Schema) -> None:
    part = {"type": "object", "properties": {"type": {"const": "text"}, "text": _STRING}, "required": ["type", "text"]}
    message = properties["messages"]["items"]
    message["properties"]["content"] = {"anyOf": [_STRING, {"type": "array", "items": part}, _NULL]}
    _close(message, MESSAGE_WITHOUT_EFFECT, REFUSED_IN_MESSAGES)
    kwargs = next(one for one in properties["chat_template_kwargs"]["anyOf"] if one.get("type") == "object")
    kwargs["additionalProperties"] = {"anyOf": [_STRING, _NUMBER, _BOOLEAN, _NULL]}
    kwargs["propertyNames"] = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(RESERVED_KWARGS)}}


def _close(schema: Schema, without_effect: Iterable[str], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Allow nothing beyond the declared fields but what has no effect or asks for nothing; see ``judge_extras``."""
    schema["additionalProperties"] = False
    for name in sorted(without_effect):
        schema["properties"].setdefault(name, {"description": "Without effect."})
    for name, (neutral, reason) in refused.items():
        allowed = {"enum": [*neutral, None], "description": f"Nothing else: {reason}."}
        schema["properties"].setdefault(name, allowed)


def _inline(node: Any, definitions: dict[str, Any]) -> None:
    """Put definitions in the place of references to them; ``node`` is modified."""
    if isinstance(node, list):
        for entry in node:
            _inline(entry, definitions)
    elif isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            node.update(definitions[node.pop("$ref").rpartition("/")[2]])
        for entry in list(node.values()):
            _inline(entry, definitions)


# --- what they get ----------------------------------------------------------------------------------------------------


def _object(properties: Schema, optional: Schema | None = None) -> Schema:
    """An object with exactly these fields."""
    return {
        "type": "object",
        "properties": properties | (optional or {}),
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _json(schema: Schema, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERROR = _object(
    {
        "error": _object(
            {"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": {"enum": list(REGISTRY)}}
        )
    }
)
_NOT_READY = _object(_ERROR["properties"], {"loading": _object({"seconds": _NUMBER, "done": _array(_STRING)})})
_ENDING = {"sentence_length": _INTEGER, "cum_log_probs": _NUMBER}
_USAGE = _object(
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER),
        "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
    }
)
_IDS = {"token_ids": _array(_INTEGER), "prompt_token_ids": _array(_INTEGER)}
_PROMPT_LOGPROB = _object({"logprob": _NUMBER, "rank": _or_null(_INTEGER), "decoded_token": _or_null(_STRING)})
_PROMPT_LOGPROBS = {"prompt_logprobs": _or_null(_array(_or_null(_map(_PROMPT_LOGPROB))))}
_LISTS = _object(
    {
        "tokens": _array(_STRING),
        "token_logprobs": _array(_or_null(_NUMBER)),
        "top_logprobs": _array(_or_null(_map(_NUMBER))),
        "text_offset": _array(_INTEGER),
    }
)
_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _array(_INTEGER)}
_TOKENS = _object({"content": _array(_object({**_TOKEN, "top_logprobs": _array(_object(_TOKEN))})), "refusal": _NULL})
_MESSAGE = _object({"role": _STRING, "content": _STRING, "refusal": _NULL})


def _generated(name: str, what: Schema, logprobs: Schema) -> Schema:
    """The answer of a route that generates, whole or as events."""
    choice = {
        "index": _INTEGER,
        **what,
        "logprobs": _or_null(logprobs),
        "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": {"anyOf": [_STRING, _INTEGER, _NULL]},
        **_ENDING,
    }
    answer = {
        **dict.fromkeys(("id", "model", "system_fingerprint"), _STRING),
        "object": {"const": name},
        "created": _INTEGER,
        "choices": _array(_object(choice, {**_IDS, **_PROMPT_LOGPROBS})),
        "usage": _USAGE,
    }
    described = _json(_object(answer, _ENDING), "The answer; with stream=true its pieces as events, the last [DONE].")
    described["content"]["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": _STRING}}}
    return described


def _answers() -> dict[str, Schema]:
    """Path -> what 200 brings."""
    card = _object(
        {
            **dict.fromkeys(("id", "root"), _STRING),
            "object": {"const": "model"},
            "owned_by": {"const": "aiakq"},
            "parent": _NULL,
            **dict.fromkeys(("created", "max_model_len", "vocab_size"), _INTEGER),
            "default_sampling": _map({}),
        }
    )
    counts = ("server_load", "num_requests_running", "num_requests_waiting")
    nothing = {"description": "Nothing."}
    ids = {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _array(_INTEGER)}
    return {
        COMPLETIONS: _generated("text_completion", {"text": _STRING}, _LISTS),
        CHAT_COMPLETIONS: _generated("chat.completion", {"message": _MESSAGE}, _TOKENS),
        "/tokenize": _json(_object({**ids, "token_strs": _or_null(_array(_STRING))}), "The token ids."),
        "/detokenize": _json(_object({"prompt": _STRING}), "The text."),
        "/v1/models": _json(_object({"object": {"const": "list"}, "data": _array(card)}), "The model, once per name."),
        "/v1/models/{name}": _json(card, "The model."),
        **dict.fromkeys(("/health", "/ping", "/reset_prefix_cache"), nothing),
        "/ready": _json(_object({"ready": {"const": True}}), "The model is loaded."),
        "/load": _json(
            _object(dict.fromkeys(counts, _INTEGER) | {"kv_cache_usage_perc": _NUMBER}), "How much work there is."
        ),
        "/version": _json(_object({"version": _STRING}), "The version."),
        "/metrics": {"description": "Prometheus metrics.", "content": {"text/plain": {"schema": _STRING}}},
        "/abort_requests": _json(_object({"aborted": _INTEGER}), "How many there were."),
    }


def _refusals(ids: Iterable[str], shapes: Mapping[str, Schema]) -> dict[str, Schema]:
    """Status -> the errors that have it; ``shapes`` are those of statuses that differ from all others."""
    of_status: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        of_status[str(REGISTRY[id].http_status)].append(id)
    return {
        status: _json(shapes.get(status, {"$ref": "#/components/schemas/Error"}), ", ".join(found))
        for status, found in sorted(of_status.items())
    }
