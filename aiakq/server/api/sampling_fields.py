"""Sampling fields of requests, derived from ``SamplingParams``.

A parameter added there becomes a field of every generation request, with its bounds and description.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import Field, create_model, field_validator

from aiakq.errors import error
from aiakq.runtime.protocol.sampling_params import Parameter, SamplingParams, parameters
from aiakq.runtime.protocol.token_bias import bias_of_list
from aiakq.server.api.request_model import LIMITED_BY, Integer, RequestModel


def _json_type(type_: object) -> Any:
    """Return ``type_`` for JSON: object keys are strings, and lists are validated up to the first error."""
    origin: object = get_origin(type_)
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(_json_type, get_args(type_)))
    if origin is dict:
        _, value = get_args(type_)
        return origin[str, _json_type(value)]
    if origin is list:
        [entry] = get_args(type_)
        return Annotated[origin[_json_type(entry)], Field(fail_fast=True)]
    return Integer if type_ is int else type_


def _keywords(parameter: Parameter, json_type: str) -> dict[str, object]:
    """Return the JSON Schema keywords of ``parameter`` for values of ``json_type``."""
    keywords = dict(parameter.schema.get(json_type, {}))
    if json_type in ("integer", "number"):
        if parameter.minimum is not None:
            keywords["exclusiveMinimum" if parameter.exclusive else "minimum"] = parameter.minimum
        if parameter.maximum is not None:
            keywords["maximum"] = parameter.http_maximum or parameter.maximum
        if parameter.limited_by:
            keywords[LIMITED_BY] = parameter.limited_by
    if json_type == "array" and parameter.limited_by:
        keywords["items"] = {"type": "integer", LIMITED_BY: parameter.limited_by}
    return keywords


def _field(type_: Any, parameter: Parameter, default: Any) -> Any:
    """Return a pydantic field whose JSON schema has the default and bounds that ``SamplingParams`` applies."""

    def describe(schema: dict[str, Any]) -> None:
        schema["default"] = default
        for branch in schema.get("anyOf", [schema]):
            branch.update(_keywords(parameter, branch.get("type", "")))

    optional = _json_type(type_) | None
    return optional, Field(default=None, description=parameter.help, json_schema_extra=describe)


_DEFAULTS = SamplingParams()
_DECLARED = {name: declared for name, declared in parameters().items() if not declared[1].only_local}

_HTTP_MAXIMUMS = {
    name: parameter.http_maximum for name, (_, parameter) in _DECLARED.items() if parameter.http_maximum is not None
}

#: Names of all sampling fields.
SAMPLING_FIELDS = tuple(_DECLARED)


def sampling_model(class_name: str, names: Iterable[str]) -> type[RequestModel]:
    """Return a base class of requests with the sampling fields ``names``, all optional."""
    fields = {name: _field(*_DECLARED[name], getattr(_DEFAULTS, name)) for name in names}
    validators: dict[str, Any] = {}
    if "logit_bias" in fields:
        validators["read_bias"] = field_validator("logit_bias", mode="before")(_read_bias)
    return create_model(class_name, __base__=RequestModel, __validators__=validators, **fields)


def _read_bias(value: Any) -> Any:
    """Return the bias of tokens as an object if it is a list, which llama.cpp's clients send. Raises as AiakqError."""
    return bias_of_list(value) if isinstance(value, list) else value


def check_http_maximums(request: object) -> None:
    """Raise ``value_out_of_range`` for a sampling field of ``request`` above its maximum for HTTP requests."""
    for name, maximum in _HTTP_MAXIMUMS.items():
        value = getattr(request, name)
        if value is not None and value > maximum:
            raise error("value_out_of_range", param=name, value=value, allowed=f"1 to {maximum}")


if TYPE_CHECKING:

    class SamplingFields(RequestModel):
        """Base class of generation requests. Here are the fields that are read by name."""

        n: int | None
        best_of: int | None
        logprobs: int | None
        prompt_logprobs: int | None
        logprob_token_ids: list[int] | None
        thinking_token_budget: int | None
else:
    SamplingFields = sampling_model("SamplingFields", SAMPLING_FIELDS)
