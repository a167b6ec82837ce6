"""Gates: conditions such as ``tpot_ms.p50>50`` that make a benchmark or an evaluation fail, for CI.

A limit is a number, a percentage such as ``99%``, or, with a sign, a change from a baseline: ``output_throughput<-5%``.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiakq.bench.summary import MACHINE
from aiakq.errors import AiakqError, error
from aiakq.records import MAX_RESULT_BYTES
from aiakq.system.files import read_named_text

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
    """A condition that fails the command if it holds.

    key       dotted path of the number in the result document.
    limit     right-hand side of ``operator``.
    relative  compare the relative change from the baseline instead of the number: 0.05 is 5 % more.
    """

    text: str
    key: str
    operator: str
    limit: float
    relative: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a gate.

    value     the measured number; None, which counts as failed, if it was not measured.
    baseline  the baseline's number for a relative gate, else None.
    part      the part of the result that the number is of, if it has several.
    """

    gate: Gate
    value: float | None
    failed: bool
    baseline: float | None = None
    part: str | None = None

    def describe(self) -> str:
        where = "" if self.part is None else f" on {self.part}"
        if self.value is None:
            return f"{self.gate.text}{where} (not measured)"
        change = "" if self.baseline is None else f", {self.value / self.baseline - 1:+.1%} of {self.baseline:.6g}"
        return f"{self.gate.text}{where} (measured {self.value:.6g}{change})"

    def document(self) -> dict[str, Any]:
        """Return the outcome for the JSON document."""
        gate = self.gate
        return {
            "gate": gate.text,
            "key": gate.key,
            "operator": gate.operator,
            "limit": gate.limit,
            "relative": gate.relative,
            "value": self.value,
            "baseline": self.baseline,
            "failed": self.failed,
            **({} if self.part is None else {"part": self.part}),
        }


def parse(texts: Iterable[str]) -> list[Gate]:
    """Parse gates; a text may contain several, separated by commas. Raises ``bad_gate``."""
    return [_parse(part.strip()) for text in texts for part in text.split(",") if part.strip()]


def _parse(text: str) -> Gate:
    match = _FORM.fullmatch(text)
    if match is None:
        raise error("bad_gate", gate=text, reason="it is not a key, an operator (> >= < <= == !=) and a number")
    number, percent = match["limit"].removesuffix("%"), match["limit"].endswith("%")
    try:
        limit = float(number)
    except ValueError:
        raise error("bad_gate", gate=text, reason=f"{match['limit']!r} is not a number") from None
    if not math.isfinite(limit):
        raise error("bad_gate", gate=text, reason="the limit is not finite")
    relative = percent and number.startswith(("+", "-"))
    return Gate(text, match["key"], match["operator"], limit / 100 if percent else limit, relative)


def _unreadable(path: Path, reason: str) -> AiakqError:
    hint = "Give the JSON of an earlier run."
    return error("usage", reason=f"The baseline {path} cannot be read: {reason}.", hint=hint)


def read_baseline(gates: Sequence[Gate], path: Path | None) -> dict[str, object]:
    """Read the baseline record of relative gates; returns an empty one if ``path`` is None.

    Raises ``bad_gate`` for a relative gate whose key the baseline lacks, ``usage`` and ``model_malformed``.
    """
    document: dict[str, Any] = {}
    if path is not None:
        try:
            document = json.loads(read_named_text(path, MAX_RESULT_BYTES, lambda reason: _unreadable(path, reason)))
        except (ValueError, RecursionError) as problem:
            raise error("no_result", file=path, reason=f"it is no JSON ({problem})") from None
        if not isinstance(document, dict) or "schema_version" not in document:
            raise error("no_result", file=path, reason="it is not a record of aiakq")
    for gate in gates:
        if not gate.relative:
            continue
        if path is None:
            raise error("bad_gate", gate=gate.text, reason="a change needs --baseline FILE to compare with")
        value = _number(document, gate.key)
        if not value:
            reason = f"the baseline {'lacks' if value is None else 'has 0 as'} {gate.key!r}"
            raise error("bad_gate", gate=gate.text, reason=reason)
    return document


def check_measurable(gates: Sequence[Gate], unmeasured: Mapping[str, str]) -> None:
    """Raise ``bad_gate`` for a gate on something this run will not measure.

    unmeasured  key of a number, or of an object with numbers -> reason.
    """
    for gate in gates:
        for key, reason in unmeasured.items():
            if gate.key == key or gate.key.startswith(f"{key}."):
                raise error("bad_gate", gate=gate.text, reason=f"this run does not measure {gate.key}: {reason}")


def check_keys(gates: Sequence[Gate], document: Mapping[str, object]) -> None:
    """Raise ``bad_gate`` for a gate whose key does not name a number (or null) in ``document``.

    Call it with an empty result before the run, so that a misspelled key fails early.
    """
    keys = list(_numeric_keys(document))
    for gate in gates:
        if gate.key not in keys:
            close = difflib.get_close_matches(gate.key, keys, n=4, cutoff=0.5)
            close += [key for key in keys if key.startswith(gate.key + ".") and key not in close][:4]
            known = f"similar keys: {', '.join(close)}" if close else f"it has {', '.join(keys[:12])}, ..."
            raise error("bad_gate", gate=gate.text, reason=f"the result has no number {gate.key!r}; {known}")


def evaluate(
    gates: Sequence[Gate], document: Mapping[str, object], baseline: Mapping[str, object] | None = None
) -> list[Outcome]:
    """Evaluate every gate, relative ones against ``baseline``. Raises ``bad_gate`` for an unknown key."""
    check_keys(gates, document)
    outcomes = []
    for gate in gates:
        value = _number(document, gate.key)
        before = _number(baseline or {}, gate.key) if gate.relative else None
        seen = value if value is None or before is None else value / before - 1
        failed = seen is None or _OPERATORS[gate.operator](seen, gate.limit)
        outcomes.append(Outcome(gate, value, failed, before))
    return outcomes


#: Returns the numbers of each part of a document, by the part's name.
Parts = Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, object]]]


def evaluate_parts(
    gates: Sequence[Gate], document: Mapping[str, object], baseline: Mapping[str, object], parts: Parts
) -> list[Outcome]:
    """Evaluate gates on a result of several parts: on each part, if those have the number, else on the whole.

    A part is compared with the part of this name of the baseline, or with the whole if there is none.
    """
    found, before = parts(document), parts(baseline)
    outcomes = []
    for gate in gates:
        named = [name for name, part in found.items() if gate.key.partition(".")[0] in part]
        if len(named) < 2:
            outcomes += evaluate([gate], document, baseline)
        for name in named if len(named) > 1 else ():
            (outcome,) = evaluate([gate], {**document, **found[name]}, {**baseline, **before.get(name, {})})
            outcomes.append(replace(outcome, part=name))
    return outcomes


def check_machines(baseline: Mapping[str, object], document: Mapping[str, object]) -> None:
    """Raise ``other_machine`` if two records come from different machines, as far as they name them."""
    if document.get("kind") == "eval":
        return  # quality does not depend on the machine
    before, after = (record.get("environment") for record in (baseline, document))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return
    differing = [
        f"{key} {before[key]!r} and {after[key]!r}"
        for key in MACHINE
        if before.get(key) is not None and after.get(key) is not None and before[key] != after[key]
    ]
    if differing:
        raise error("other_machine", differences="; ".join(differing), remedy="measure the baseline here")


def failure(outcomes: Sequence[Outcome]) -> AiakqError | None:
    """Return the ``gate_failed`` error that the command exits with, or None if every gate passed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return None
    listed = ", ".join(outcome.describe() for outcome in failed)
    return error("gate_failed", failed=len(failed), total=len(outcomes), gates=listed)


def _number(document: Mapping[str, object], key: str) -> float | None:
    """Return the number under a dotted key, or None."""
    value: object = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _numeric_keys(document: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _numeric_keys(value, f"{prefix}{key}.")
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            yield prefix + key
