"""Gates: conditions such as ``tpot_ms.p50>50`` that make a benchmark or an evaluation fail, for CI."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*(?P<key>[A-Za-z0-9_.\-/]+)\s*(?P<operator>>=|<=|==|!=|>|<)\s*(?P<limit>\S+)\s*")


@dataclass(frozen=True)
class Gate:
    """Fail if the number under ``key`` (dots lead into nested results) stands in this relation to ``limit``."""

    text: str
    key: str
    operator: str
    limit: float


@dataclass(frozen=True)
class Outcome:
    """The result of a gate. ``value`` is None if nothing was measured, which counts as failed."""

    gate: Gate
    value: float | None
    failed: bool

    def describe(self) -> str:
        return f"{self.gate.text} (it is {'not measured' if self.value is None else f'{self.value:.6g}'})"


def parse(texts: Iterable[str]) -> list[Gate]:
    """Read gates; one text may hold several with commas between them. Raises ``bad_gate``."""
    return [_parse(part.strip()) for text in texts for part in text.split(",") if part.strip()]


def _parse(text: str) -> Gate:
    match = _FORM.fullmatch(text)
    if match is None:
        raise error("bad_gate", gate=text, reason="it is not a key, an operator (> >= < <= == !=) and a number")
    try:
        limit = float(match["limit"])
    except ValueError:
        raise error("bad_gate", gate=text, reason=f"{match['limit']!r} is not a number") from None
    if not math.isfinite(limit):
        raise error("bad_gate", gate=text, reason="the limit is not finite")
    return Gate(text, match["key"], match["operator"], limit)


def check_keys(gates: Sequence[Gate], document: Mapping[str, Any]) -> None:
    """Raise ``bad_gate`` for a gate whose key is not a number of ``document``; values are not looked at.

    Called with an empty result before the run, so that a misspelled key does not cost a long run.
    """
    keys = list(_numeric_keys(document))
    for gate in gates:
        if gate.key not in keys:
            close = difflib.get_close_matches(gate.key, keys, n=4, cutoff=0.5)
            close += [key for key in keys if key.startswith(gate.key + ".") and key not in close][:4]
            known = f"close ones are {', '.join(close)}" if close else f"the result holds {', '.join(keys[:12])}, ..."
            raise error("bad_gate", gate=gate.text, reason=f"the result has no number {gate.key!r}; {known}")


def evaluate(gates: Sequence[Gate], document: Mapping[str, Any]) -> list[Outcome]:
    """Evaluate every gate on ``document``. Raises ``bad_gate`` for an unknown key."""
    check_keys(gates, document)
    outcomes = []
    for gate in gates:
        value: Any = document
        for part in gate.key.split("."):
            value = value[part]
        failed = value is None or _OPERATORS[gate.operator](value, gate.limit)
        outcomes.append(Outcome(gate, value, failed))
    return outcomes


def failure(outcomes: Sequence[Outcome]) -> AiakqError | None:
    """The error that ends the command when a gate failed, else None."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    listed = ", ".join(outcome.describe() for outcome in failed)
    return error("gate_failed", failed=len(failed), total=len(outcomes), gates=listed)


def _numeric_keys(document: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _numeric_keys(value, f"{prefix}{key}.")
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            yield prefix + key
