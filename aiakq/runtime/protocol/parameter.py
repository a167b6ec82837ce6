"""Parameter: a declared parameter of a request, and the errors for values that its constraint refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.constraints import Constraint, Refusal
from aiakq.errors import AiakqError, error


@dataclass(kw_only=True, eq=False)
class Parameter(Constraint):
    """A declared parameter.

    only_local    whether only ``LLM`` accepts it, and HTTP requests do not.
    http_maximum  upper bound of HTTP requests, if that is lower.
    """

    only_local: bool = False
    http_maximum: int | None = None


class Checks:
    """Constraints of several values, by name."""

    def __init__(self, constraints: Mapping[str, Constraint]) -> None:
        self._rows = [(name, constraint, *constraint.quick) for name, constraint in constraints.items()]

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ``invalid_type`` or ``value_out_of_range`` for the first of ``values`` that is refused.

        Numbers, booleans, short texts and None that are allowed cost no call: this runs for every request.
        """
        for name, constraint, accepted, measured, lowest, highest in self._rows:
            value = values[name]
            kind = type(value)
            if kind in accepted:
                continue
            if kind in measured and lowest <= (len(value) if kind is str else value) <= highest:
                continue
            refused = constraint.refusal(value)
            if refused is not None:
                raise request_error(name, refused)


def request_error(param: str, refusal: Refusal) -> AiakqError:
    """Return ``invalid_type`` or ``value_out_of_range``."""
    if refusal.kind:
        return error("invalid_type", param=param, reason=f"{refusal.kind} is expected, not {refusal.value!r:.64}")
    return error("value_out_of_range", param=param, value=refusal.value, allowed=refusal.expected)
