"""RequestModel: strict pydantic models of request bodies, with errors of the error registry.

Bodies are parsed from raw bytes, so that "1" is not a number, true is not a count and NaN is not a temperature. Fields
beyond the declared ones are checked against unsupported_fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from aiakq.errors import AiakqError, error
from aiakq.server.api.unsupported_fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS, UnsupportedField
from aiakq.server.http.json_surrogates import mended_json

Entry = TypeVar("Entry")
#: Makes validation stop at the first invalid entry, because a million errors would cost more than the request.
FailFastList = Annotated[list[Entry], Field(fail_fast=True)]

#: JSON schema key for bounds that depend on the loaded model; openapi.py replaces it with numbers.
LIMITED_BY = "x-limited-by"

#: Callback with the error for an unknown field that is accepted anyway.
OnUnknownField = Callable[[AiakqError], None]


class RequestModel(BaseModel):
    """A JSON object of a request, validated without type coercion or NaN.

    open                whether undeclared fields are ignored, unless unsupported_fields names them.
    ignored_fields      undeclared fields that are accepted without effect.
    unsupported_fields  undeclared fields that are rejected unless their value is neutral.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    open: ClassVar[bool] = False
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    def check_extra_fields(self, path: str = "", on_unknown: OnUnknownField | None = None) -> None:
        """Raise ``unknown_field`` or ``unsupported_parameter`` for undeclared fields of the object at ``path``.

        If ``on_unknown`` is given, it is called with the error for an unknown field, or for a hint, instead.
        """
        for name, value in (self.model_extra or {}).items():
            param = f"{path}.{name:.64}" if path else f"{name:.64}"
            if name in self.ignored_fields or value is None:  # clients send null for unset fields
                continue
            unsupported = self.unsupported_fields.get(name)
            if unsupported is None:
                if self.open:
                    continue
                failure = error("unknown_field", param=param)
            elif unsupported.accepts(value):
                continue
            else:
                switch = "; a server with --unknown-fields warn ignores it" if unsupported.hint else ""
                failure = error("unsupported_parameter", param=param, reason=unsupported.reason + switch)
            if on_unknown is None or (unsupported is not None and not unsupported.hint):
                raise failure
            on_unknown(failure)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema, extended by the undeclared fields that are accepted, with their values."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["additionalProperties"] = cls.open
        properties = schema.setdefault("properties", {})
        for name in sorted(cls.ignored_fields):
            properties.setdefault(name, {"description": "Without effect."})
        for name, unsupported in cls.unsupported_fields.items():
            description = f"Nothing else: {unsupported.reason}."
            properties.setdefault(name, {"enum": [*unsupported.neutral, None], "description": description})
        return reference


Model = TypeVar("Model", bound=RequestModel)


def parse_body(model: type[Model], body: bytes, on_unknown: OnUnknownField | None = None) -> Model:
    """Parse a request body as ``model``. For ``on_unknown``, see ``RequestModel.check_extra_fields``.

    In texts, lone surrogates become U+FFFD. Raises invalid_json, missing_field, invalid_type, value_out_of_range,
    unknown_field or unsupported_parameter. The error names the field and repeats nothing the client sent except names.
    """
    try:
        request = _parsed(model, body)
    except ValidationError as failure:
        raise _to_aiakq_error(failure) from None
    request.check_extra_fields(on_unknown=on_unknown)
    check_nested(request, "", on_unknown)
    return request


def _parsed(model: type[Model], body: bytes) -> Model:
    """Parse a body as ``model``, without lone surrogates. Raises ValidationError, and as ``mended_json``."""
    try:
        return model.model_validate_json(body)
    except ValidationError as failure:
        if failure.errors(include_url=False, include_context=False, include_input=False)[0]["type"] != "json_invalid":
            raise
        mended = mended_json(body)
        if mended is None:
            raise
    return model.model_validate_json(mended)


def parse_values(model: type[Model], values: Any) -> Model:
    """Validate ``values``, a part of a body, as ``model``. Raises as ``parse_body``, which checks undeclared fields."""
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        raise _to_aiakq_error(failure) from None


def check_nested(request: RequestModel, path: str, on_unknown: OnUnknownField | None) -> None:
    """Call ``RequestModel.check_extra_fields`` of the object fields of ``request``; lists check their own entries."""
    for name in type(request).model_fields:
        value = getattr(request, name)
        if isinstance(value, RequestModel):
            nested = f"{path}{name.rstrip('_')}"
            value.check_extra_fields(nested, on_unknown)
            check_nested(value, f"{nested}.", on_unknown)


def _to_aiakq_error(failure: ValidationError) -> AiakqError:
    """Convert pydantic's first error to an entry of the error registry."""
    first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location, text = first["type"], first["loc"], first["msg"]
    text = text[:1].lower() + text[1:]
    if not location:
        reason = "an object is expected" if kind != "json_invalid" else text.removeprefix("invalid JSON: ")
        return error("invalid_json", reason=reason)
    param = _format_location(location)
    if kind == "missing":
        return error("missing_field", param=param)
    if kind == "finite_number":
        return error("value_out_of_range", param=param, value="not finite", allowed="a finite number")
    if kind == "too_short":
        return error("value_out_of_range", param=param, value="empty", allowed="at least one entry")
    if location[0] == "stop":  # a union, for which pydantic reports an error per branch
        text = "a string or a list of strings is expected"
    return error("invalid_type", param=param, reason=text)


def _format_location(location: tuple[int | str, ...]) -> str:
    """Format a pydantic location like ``messages[0].content``, with keys truncated to 64 characters."""
    if location[0] == "stop":
        return "stop"
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part:.64}"
    return text.lstrip(".")
