"""Sampling fields of requests, derived from ``SamplingParams``.

A parameter added there becomes a field of every generation request, with its bounds and description.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import replace
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field, create_model, field_validator

from aiakq.runtime.protocol.parameter import Parameter
from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.runtime.protocol.token_bias import bias_of_list
from aiakq.server.api.request_model import Integer, RequestModel


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


def _field(type_: Any, parameter: Parameter, default: Any) -> Any:
    """Return a pydantic field whose JSON schema has the default and bounds that ``SamplingParams`` applies."""
    for_http, json_type = parameter, _json_type(type_)
    if parameter.http_maximum is not None:
        expected = f"{parameter.low} to {parameter.http_maximum}"
        for_http = replace(parameter, high=parameter.http_maximum, expected=expected)
        json_type = Annotated[Integer, for_http]

    def describe(schema: dict[str, Any]) -> None:
        schema["default"] = default
        for branch in schema.get("anyOf", [schema]):
            branch.update(for_http.schema(branch["type"]))

    return json_type | None, Field(default=None, description=parameter.help, json_schema_extra=describe)


_DEFAULTS = SamplingParams()
_TYPES = get_type_hints(SamplingParams)

#: Names of all sampling fields.
SAMPLING_FIELDS = tuple(name for name, parameter in PARAMETERS.items() if not parameter.only_local)


def sampling_model(class_name: str, names: Iterable[str]) -> type[RequestModel]:
    """Return a base class of requests with the sampling fields ``names``, all optional."""
    fields = {name: _field(_TYPES[name], PARAMETERS[name], getattr(_DEFAULTS, name)) for name in names}
    validators: dict[str, Any] = {}
    if "logit_bias" in fields:
        validators["read_bias"] = field_validator("logit_bias", mode="before")(_read_bias)
    return create_model(class_name, __base__=RequestModel, __validators__=validators, **fields)


def _read_bias(value: Any) -> Any:
    """Return the bias of tokens as an object if it is a list, which llama.cpp's clients send. Raises as AiakqError."""
    return bias_of_list(value) if isinstance(value, list) else value


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
