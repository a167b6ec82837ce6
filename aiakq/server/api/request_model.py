"""RequestModel: strict pydantic models of request bodies, with errors of the error registry.

Bodies are parsed from raw bytes, so that "1" is not a number, true is not a count and NaN is not a temperature. Fields
beyond the declared ones are looked up in unsupported_fields.py and foreign_fields.py; unknown_fields.py says what
happens to the others. Integers may be written with a fraction of zero, like 4.0, as JSON Schema defines them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.parameter import Checks
from aiakq.server.api.foreign_field import IGNORED, ForeignField, NotSupported
from aiakq.server.api.foreign_fields import OPTIONS
from aiakq.server.api.unknown_fields import REFUSE, UnknownFields
from aiakq.server.api.unsupported_fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS, UnsupportedField
from aiakq.server.http.json_surrogates import mended_json

Entry = TypeVar("Entry")
#: Makes validation stop at the first invalid entry, because a million errors would cost more than the request.
FailFastList = Annotated[list[Entry], Field(fail_fast=True)]


class _IntegralNumber:
    """Annotation for integers that may be written as 4.0 or 4e0, but not as 4.5, "4" or true."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        number, integer = core_schema.float_schema(strict=True), core_schema.int_schema(strict=False)
        integral = core_schema.chain_schema([number, integer])
        return core_schema.union_schema(
            [core_schema.int_schema(strict=True), integral],
            mode="left_to_right",
            custom_error_type="int_type",
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return handler(core_schema.int_schema())


#: The type of integers in requests.
Integer = Annotated[int, _IntegralNumber()]


class RequestModel(BaseModel):
    """A JSON object of a request, validated without type coercion or NaN.

    open                whether undeclared fields are ignored with --unknown-fields refuse, too.
    passes_on           whether undeclared fields are passed on, and so not ignored.
    ignored_fields      undeclared fields that are accepted without effect.
    unsupported_fields  undeclared fields that are rejected unless their value is neutral.
    foreign_fields      undeclared fields of other servers; see foreign_fields.py.
    own_names           name in foreign_fields -> name of the field here, where they differ.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    open: ClassVar[bool] = False
    passes_on: ClassVar[bool] = False
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS
    foreign_fields: ClassVar[Mapping[str, ForeignField]] = {}
    own_names: ClassVar[Mapping[str, str]] = {}

    def check_extra_fields(self, path: str = "", unknown: UnknownFields = REFUSE) -> None:
        """Translate, ignore or refuse the undeclared fields of the object at ``path``.

        Raises ``unknown_field`` or ``unsupported_parameter``, and ``invalid_type`` for translated fields.
        """
        for name, value in (self.model_extra or {}).items():
            param = f"{path}.{name:.64}" if path else f"{name:.64}"
            if name == OPTIONS and isinstance(value, dict) and self.foreign_fields and not unknown.refuses:
                for option, setting in value.items():
                    self._check_option(option, setting, f"{param}.{option:.64}", unknown)
            else:
                self._check_extra_field(name, value, param, unknown)

    def check_parts(self, path: str, unknown: UnknownFields) -> None:
        """Check the fields of objects in the object at ``path`` that no model declares; see part_fields.py."""

    def sent(self, name: str) -> Any:
        """Return the value of a declared or undeclared field, or of Ollama's options; None if it is not set."""
        extra = self.model_extra or {}
        value = getattr(self, name) if self.has(name) else extra.get(name)
        options = extra.get(OPTIONS)
        return options.get(name) if value is None and isinstance(options, dict) else value

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether ``name`` is a declared field."""
        return name in cls.model_fields

    def take(self, name: str, value: object, param: str, field: ForeignField, unknown: UnknownFields) -> None:
        """Set the declared field ``name`` to what the undeclared one at ``param`` says.

        Raises ``unsupported_parameter`` if it is set to another value or not declared, and ``invalid_type``.
        """
        own = self.own_names.get(name, name)
        if not self.has(own):
            if field.hint:
                unknown.ignore(error("unknown_field", param=param, hint=""))
                return
            raise error("unsupported_parameter", param=param, reason=f"requests to this route have no {own}")
        given = getattr(self, own)
        if given is not None and given != value and not field.replaces:
            raise error("unsupported_parameter", param=param, reason=f"{own} is given too, with another value")
        try:
            self.__pydantic_validator__.validate_assignment(self, own, value)
        except ValidationError as failure:
            refusal = _to_aiakq_error(failure)
            raise error(refusal.id, **refusal.fields | {"param": param}) from None

    def _check_option(self, name: str, value: object, param: str, unknown: UnknownFields) -> None:
        if not self.has(name):
            self._check_extra_field(name, value, param, unknown)
        elif value is not None:
            self.take(name, value, param, _SAME, unknown)

    def _check_extra_field(self, name: str, value: object, param: str, unknown: UnknownFields) -> None:
        if name in self.ignored_fields or value is None:  # clients send null for unset fields
            return
        unsupported = self.unsupported_fields.get(name)
        if unsupported is not None:
            if not unsupported.accepts(value):
                switch = "; a server with --unknown-fields ignore ignores it" if unsupported.hint else ""
                failure = error("unsupported_parameter", param=param, reason=unsupported.reason + switch)
                if unknown.refuses or not unsupported.hint:
                    raise failure
                unknown.ignore(failure)
            return
        translated_field = None if unknown.refuses else self.foreign_fields.get(name)
        if translated_field is not None:
            try:
                translated = translated_field.translate(value, self)
            except NotSupported as reason:
                refusal = error("unsupported_parameter", param=param, reason=str(reason))
                if not translated_field.named:
                    raise refusal from None
                unknown.ignore(refusal)
                return
            for target, entry in translated.items():
                self.take(target, entry, param, translated_field, unknown)
            return
        if self.open and unknown.refuses:
            return
        unknown.check(param, name, self._known_names())
        if not self.passes_on:
            unknown.ignore(error("unknown_field", param=param, hint="It was ignored."))

    @classmethod
    @functools.cache
    def constraints(cls) -> Checks:
        """Return the constraints in the annotations of fields. Null means that a field is not set."""
        return Checks(
            {
                name: replace(constraint, optional=True)
                for name, field in cls.model_fields.items()
                for constraint in (*field.metadata, *_annotations(field.annotation))
                if isinstance(constraint, Constraint)
            }
        )

    @classmethod
    @functools.cache
    def _nested_fields(cls) -> tuple[str, ...]:
        """Return the names of the fields that can hold objects."""
        return tuple(name for name, field in cls.model_fields.items() if _holds_model(field.annotation))

    @classmethod
    @functools.cache
    def _known_names(cls) -> frozenset[str]:
        """Return the names of fields that an unknown one may be a misspelling of: those that are declared or looked up.

        Of the fields of other servers, only those with an effect, and not the shortest, which resemble too many words.
        """
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        looked_up = {name for name, field in cls.foreign_fields.items() if field is not IGNORED and len(name) > 4}
        return frozenset(declared | cls.ignored_fields | cls.unsupported_fields.keys() | looked_up)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema_of_model: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        """Return the schema, extended by the undeclared fields that are accepted, with their values."""
        reference = handler(schema_of_model)
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
_SAME = ForeignField(lambda value, sent: {})


def parse_body(model: type[Model], body: bytes, unknown: UnknownFields = REFUSE) -> Model:
    """Parse a request body as ``model``; ``unknown`` says what happens to unknown fields.

    In texts, lone surrogates become U+FFFD. Raises invalid_json, missing_field, invalid_type, value_out_of_range,
    unknown_field or unsupported_parameter. The error names the field and repeats nothing the client sent except names.
    """
    try:
        request = _parsed(model, body)
    except ValidationError as failure:
        raise _to_aiakq_error(failure) from None
    if b"NaN" in body or b"Infinity" in body:
        _check_constants(body)
    request.check_extra_fields("", unknown)
    request.check_parts("", unknown)
    _check_nested(request, "", unknown)
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


def _check_constants(body: bytes) -> None:
    """Raise ``invalid_json`` for NaN and Infinity outside strings, which the parser accepts in fields of any type."""

    def refuse(name: str) -> None:
        raise error("invalid_json", reason=f"it has the value {name}")

    json.loads(body, parse_constant=refuse, parse_int=len, parse_float=len)


def parse_values(model: type[Model], values: object) -> Model:
    """Validate ``values``, a part of a body, as ``model``. Raises as ``parse_body``, which checks undeclared fields."""
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        raise _to_aiakq_error(failure) from None


def _check_nested(request: RequestModel, path: str, unknown: UnknownFields) -> None:
    """Call ``RequestModel.check_extra_fields`` of the objects in ``request`` and in its lists."""
    for name in type(request)._nested_fields():
        value = getattr(request, name)
        if isinstance(value, RequestModel):
            _check_object(value, f"{path}{name.rstrip('_')}", unknown)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, RequestModel):
                    _check_object(entry, f"{path}{name}[{index}]", unknown)


def _annotations(annotation: object) -> Iterator[object]:
    """Return what annotates the alternatives of a type."""
    for part in get_args(annotation):
        yield from getattr(part, "__metadata__", ())


def _holds_model(annotation: object) -> bool:
    """Whether a value of a type can be, or hold in a list, an object of a request."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        return True
    return any(map(_holds_model, get_args(annotation)))


def _check_object(value: RequestModel, path: str, unknown: UnknownFields) -> None:
    if value.model_extra:
        value.check_extra_fields(path, unknown)
    value.check_parts(path, unknown)
    if type(value)._nested_fields():
        _check_nested(value, f"{path}.", unknown)


def _to_aiakq_error(failure: ValidationError) -> AiakqError:
    """Convert pydantic's first error to an entry of the error registry."""
    first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location, text = first["type"], first["loc"], first["msg"]
    if kind == "value_error":  # what a validator raised
        raised = failure.errors(include_url=False, include_input=False)[0]["ctx"]["error"]
        if isinstance(raised, AiakqError):
            return raised
    text = text[:1].lower() + text[1:]
    if not location:
        reason = "an object is expected" if kind != "json_invalid" else text.removeprefix("invalid JSON: ")
        return error("invalid_json", reason=reason)
    if location[0] == "logit_bias" and len(location) > 2:  # a union, too
        location, text = location[:2], "a number or false is expected"
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
