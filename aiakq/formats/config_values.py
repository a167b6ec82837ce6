"""Validated access to the values of config files, which are untrusted input.

``read_value`` is for config.json; the other functions are for its ``quantization_config``, which tools write in many
ways, and raise ``format_unsupported``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error

#: A size, a count, a switch, and an object.
SIZE = Constraint(type=int, low=1, high=2**31 - 1, expected="a positive integer")
COUNT = Constraint(type=int, low=0, high=2**31 - 1, expected="a number of 0 or more")
SWITCH, OBJECT = Constraint(type=bool), Constraint(type=dict)
_INTEGER = Constraint(type=int, low=-1, high=2**31 - 1)


def malformed(name: str, value: object, expected: str = "") -> AiakqError:
    """Return ``model_malformed`` for a value in config.json."""
    reason = f"{name} is {value!r:.64}" + (f", not {expected}" if expected else "")
    return error("model_malformed", file="config.json", reason=reason)


def read_value(config: Mapping[str, object], constraint: Constraint, *names: str, default: object = ...) -> Any:
    """Return the value in config.json under the first of ``names`` that is present and not null, or ``default``.

    Raises ``model_malformed`` if ``constraint`` refuses it, or without a default.
    """
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if value is None and default is not ...:
        return default
    refused = constraint.refusal(value)
    if refused is not None:
        raise malformed(name, value, refused.expected)
    return value


def unsupported(reason: str) -> AiakqError:
    """Return a ``format_unsupported`` error."""
    return error("format_unsupported", reason=reason)


def first_of(config: Mapping[str, object], *names: str, default: object = None) -> object:
    """Return the value under the first of ``names`` that is present and not null; tools use different spellings."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def read_word(config: Mapping[str, object], *names: str, default: str) -> str:
    """Return ``first_of`` as a lower-case string."""
    return str(first_of(config, *names, default=default)).strip().lower()


def read_integer(value: object, what: str) -> int:
    """Validate an integer from -1 to 2**31 - 1; some tools write it as text or as a float."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,10}", value.strip()):
        value = int(value)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    if _INTEGER.refusal(value) is not None:
        raise unsupported(f"{what} is {value!r:.40}")
    assert isinstance(value, int)
    return value


def read_group_size(value: object) -> int:
    """Validate a group size; 0, -1 and null mean one scale per output row and become -1."""
    size = read_integer(-1 if value is None else value, "group_size")
    return size if size > 0 else -1


def read_bits(value: object, what: str) -> int:
    """Validate a bit width: 2, 3, 4 or 8."""
    try:
        bits = read_integer(value, "bits")
    except AiakqError:
        bits = 0
    if bits not in (2, 3, 4, 8):
        raise unsupported(f"{what} with {value!r:.40} bits")
    return bits


def read_flag(value: object, what: str) -> bool:
    """Validate a boolean, which some tools write as a number or as text."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, "true", "1"):
        return True
    if word in (False, None, "false", "0", ""):
        return False
    raise unsupported(f"{what} is {value!r:.40}")


def read_names(value: object, what: str) -> tuple[str, ...]:
    """Validate a list of names or patterns, or one of them; null and false are an empty list."""
    names = [value] if isinstance(value, str) and value else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise unsupported(f"{what} is not a list of names")
    return tuple(names)


def read_object(value: object, what: str) -> Mapping[str, object]:
    """Validate a JSON object; null and false are an empty one."""
    document = {} if value is None or value is False else value
    if not isinstance(document, Mapping):
        raise unsupported(f"{what} is {value!r:.40}, not an object")
    return document


def says_nothing(value: object) -> bool:
    """Whether a key with this value might as well be absent; some tools write null and false as text."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "none", "null", "false")
    return value is None or value is False or (isinstance(value, (list, dict)) and not value)


def merged(outer: Mapping[str, object], inner: Mapping[str, object], what: str) -> dict[str, object]:
    """Return the keys of a config and of the one inside it. Raises ``format_unsupported`` if a key has two values."""
    own = {key: value for key, value in inner.items() if _spelled(value) is not None}
    for key, value in own.items():
        other = _spelled(outer.get(key))
        if other is not None and other != _spelled(value):
            raise unsupported(f"{what} with {key:.60} {outer[key]!r:.60}, and in the config inside it {value!r:.60}")
    return {**inner, **outer, **own}


def _spelled(value: object) -> object:
    """Return a value in one of its spellings: words in lower case, names in order; None if it is empty."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return sorted(value)
    word = value.strip().lower() if isinstance(value, str) else value
    return None if word in ("", "none", "null") else word
