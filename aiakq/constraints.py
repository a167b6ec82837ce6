"""Constraint: what a value may be, stated once and checked by one method. Standard library only.

The options of commands, ``SamplingParams``, the parameters of transforms and rounders, and the fields of requests are
declared with constraints; the readers of config files apply them too. Errors and JSON Schema are derived from them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

#: ``type``, where a field has this name.
AnyType = type
#: Keyword in a JSON schema for bounds that depend on the loaded model.
LIMITED_BY = "x-limited-by"
#: Types of values: in messages, and in JSON Schema.
_IN_WORDS: dict[type, str] = {
    **{str: "a string", int: "an integer", float: "a number", bool: "true or false"},
    **{list: "a list", tuple: "a list", dict: "an object", Path: "a path"},
}
_IN_JSON = {str: "string", int: "integer", float: "number"}
_TYPES: dict[str, type] = {kind.__name__: kind for kind in _IN_WORDS}
#: Other types of values that are accepted. True and false are no integers.
_ALSO: dict[type, tuple[type, ...]] = {float: (int,), tuple: (list,), Path: (str,)}
#: Annotation of a field that lists its values.
_LITERAL = re.compile(r"Literal\[([^\]]*)\]")
#: Limits from here on are named in the error for a larger value, whatever ``expected`` says.
_LARGE = 10_000


class Refusal(NamedTuple):
    """Why a value is refused.

    value     the value, or the part of it that is wrong, shortened if it is long.
    expected  what is allowed in its place, as in "which is not ...".
    kind      description of its type if it has the wrong one, else empty.
    """

    value: object
    expected: str
    kind: str = ""


@dataclass(kw_only=True, eq=False)
class Constraint:
    """What a value may be. Texts, lists and objects have a size, their number of characters or entries.

    It is not modified. Hundreds are created when a command starts; a frozen class would take twice as long.

    type         str, int, float, bool, list, tuple, dict or Path; ``object`` for any.
    also         other accepted types.
    optional     whether None is accepted.
    automatic    whether ``auto`` is accepted in place of a number.
    words        description of the type; that of ``type`` if empty.
    choices      allowed values, if they can be listed.
    low, high    inclusive bounds of a number.
    above        exclusive lower bound.
    excluded     values within the bounds that are not allowed.
    least, most  bounds of the size.
    noun         what is counted, in messages.
    entries      constraint of every entry of a list, or value of an object; a text is a list of one.
    names        constraint of the keys of an object.
    pattern      regular expression that is found in a text.
    expected     description of valid values, if bounds and choices do not express it well.
    hint         second sentence of an error.
    limited_by   bound that depends on the loaded model, see ``LIMITED_BY``.
    name, help   of a declared field.
    default      of a declared field; None if the program decides as described in ``help``.
    required     whether a declared field has no default.
    """

    type: type = object
    also: tuple[AnyType, ...] = ()
    optional: bool = False
    automatic: bool = False
    words: str = ""
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    excluded: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    noun: str = "entries"
    entries: Constraint | None = None
    names: Constraint | None = None
    pattern: str = ""
    expected: str | None = None
    hint: str | None = None
    limited_by: str = ""
    name: str = ""
    help: str = ""
    default: Any = None
    required: bool = False

    @property
    def kind(self) -> str:
        """Description of the type, for messages."""
        return self.words or " or ".join(_IN_WORDS.get(kind, "a value") for kind in (self.type, *self.also))

    @cached_property
    def types(self) -> tuple[AnyType, ...]:
        """All accepted types."""
        also = tuple(kind for kind in self.also if not (self.automatic and kind is str))
        return (self.type, *_ALSO.get(self.type, ()), *also)

    @cached_property
    def quick(self) -> tuple[frozenset[AnyType], frozenset[AnyType], float, float]:
        """What is checked without a call: the types whose values are all allowed, and the types of numbers, or of
        texts by their size, that are allowed from the first bound to the second.
        """
        limits = (self.choices, self.low, self.high, self.above, self.excluded, self.least, self.most, self.pattern)
        is_open = not any(limit not in ((), None, "") for limit in (*limits, self.entries, self.names))
        accepted = {bool} if self.type is bool else set(self.types) if is_open else set()
        lowest, highest = self.low if self.above is None else math.nextafter(self.above, math.inf), self.high
        measured = {int, float} & set(self.types)
        if self.type is str and not (self.also or self.pattern):
            lowest, highest, measured = self.least, self.most, {str}
        return (
            frozenset(accepted | ({type(None)} if self.optional else set())),
            frozenset() if self.choices or self.excluded else frozenset(measured),
            -math.inf if lowest is None else lowest,
            math.inf if highest is None else highest,
        )

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # In JSON Schema, $ does not match before a line feed at the end.
        return re.compile(self.pattern.removesuffix("$") + r"\Z" if self.pattern.endswith("$") else self.pattern)

    def refusal(self, value: Any) -> Refusal | None:
        """Return why ``value`` is refused; None if it is allowed."""
        kind, (accepted, measured, lowest, highest) = type(value), self.quick
        if kind in accepted or (kind in measured and lowest <= (len(value) if kind is str else value) <= highest):
            return None
        if self.automatic and kind is str and value == "auto":
            return None
        if not isinstance(value, self.types) or (kind is bool and self.type not in (bool, object)):
            return Refusal(value, self.expected or self.kind, self.kind)
        if self.choices and value not in self.choices:
            listed, given = ", ".join(map(str, self.choices)), value[:64] if isinstance(value, str) else value
            return Refusal(given, self.expected or f"one of {listed}", self.kind if self.type is bool else "")
        if isinstance(value, str) and self.entries is not None:
            return self.entries.refusal(value)
        return self._missed_size(value) if hasattr(value, "__len__") else self._missed_bound(value)

    def _missed_bound(self, value: Any) -> Refusal | None:
        if self.above is not None and not value > self.above:
            return Refusal(value, self.expected or f"above {self.above:g}")
        if self.low is not None and not value >= self.low:
            return Refusal(value, self.expected or f"at least {self.low}")
        if self.high is not None and not value <= self.high:
            named = None if value > self.high >= _LARGE else self.expected
            return Refusal(value, named or f"at most {self.high}")
        return Refusal(value, self.expected or f"not {value}") if value in self.excluded else None

    def _missed_size(self, value: Any) -> Refusal | None:
        size, least, most = len(value), self.least or 0, math.inf if self.most is None else self.most
        is_text = isinstance(value, str)
        if not least <= size <= most or (is_text and not self._regex.search(value)):
            bounds = f"at least {least}" if self.most is None else f"{least} to {most}" if least else f"at most {most}"
            return Refusal(value[:64] if is_text else f"{size} {self.noun}", self.expected or bounds)
        for constraint, parts in ((self.names, value), (self.entries, value.values() if self.type is dict else value)):
            if constraint is not None and not constraint.quick[0].issuperset(map(type, parts)):
                refused = next(filter(None, map(constraint.refusal, parts)), None)
                if refused is not None:
                    return refused
        return None

    def schema(self, json_type: str | None = None) -> dict[str, Any]:
        """Return the JSON Schema for values of ``json_type``; of ``type`` if None."""
        json_type = json_type or _IN_JSON[self.type]
        stated: dict[str, Any] = {}
        if json_type in ("integer", "number"):
            stated = {LIMITED_BY: self.limited_by}
            stated |= {"exclusiveMinimum": self.above, "minimum": self.low, "maximum": self.high}
            stated |= {"not": {"const": self.excluded[0]}} if self.excluded else {}
        elif json_type == "array":
            stated = {"minItems": self.least, "maxItems": self.most, "items": self.entries and self.entries.schema()}
        elif json_type == "object":
            stated = {"maxProperties": self.most, "propertyNames": self.names and self.names.schema()}
        elif json_type == "string" and self.entries is not None:
            return self.entries.schema()
        elif json_type == "string":
            stated = {"minLength": self.least, "maxLength": self.most, "pattern": self.pattern}
            stated |= {"enum": list(self.choices), LIMITED_BY: self.limited_by}
        return {"type": json_type} | {name: value for name, value in stated.items() if value not in (None, "", [])}

    def __get_pydantic_json_schema__(self, core_schema: object, handler: Callable[[Any], dict[str, Any]]) -> object:
        """Extend the schema of a pydantic field that has this constraint in its annotation."""
        schema = handler(core_schema)
        return schema | self.schema(schema["type"])


ConstraintT = TypeVar("ConstraintT", bound=Constraint)


def declare(default: object, help: str = "", **settings: object) -> Any:
    """Declare a dataclass field; ``settings`` are fields of the subclass of ``Constraint`` that describes it.

    ``...`` as the default makes it required; ``dict`` is a new empty one.
    """
    metadata = {"declared": {"help": help, **settings}}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declarations(options: type, kind: type[ConstraintT], **common: object) -> dict[str, ConstraintT]:
    """Return the declared fields of a dataclass by name.

    ``common`` settings take precedence over the annotation of a field, and those of its declaration over both.
    """
    fields = [field for field in dataclasses.fields(options) if "declared" in field.metadata]
    return {field.name: constraint_of(field, kind, **common) for field in fields}


def constraint_of(field: dataclasses.Field[Any], kind: type[ConstraintT], **common: object) -> ConstraintT:
    """Return the constraint of a dataclass field: that of its type, and of its declaration if there is one."""
    required = field.default is field.default_factory is dataclasses.MISSING
    default = None if field.default is dataclasses.MISSING else field.default
    settings = {**_settings(field.type), **common, **field.metadata.get("declared", {})}
    return kind(name=field.name, default=default, required=required, **settings)


def _settings(annotation: object) -> dict[str, Any]:
    """Return the settings of ``Constraint`` that an annotation expresses, such as ``int | None``."""
    words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    names = [name.partition("[")[0] for name in words.split(" | ")]
    if listed := _LITERAL.match(words):
        return {"type": str, "choices": tuple(re.findall("'([^']*)'", listed[1])), "optional": "None" in names}
    kinds = [_TYPES[name] for name in names if name in _TYPES]
    return {"type": (kinds or [object])[0], "also": tuple(kinds[1:]), "optional": "None" in names}
