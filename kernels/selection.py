"""Selection of an operation's implementation: the first in its registry that is enabled and supports the problem."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType

from aiakq.kernels.registry import Registry

#: Environment variable that lists the enabled implementations, separated by commas: ``triton,cpu``, or for one
#: operation ``attention=torch``. The reference implementations, ``reference`` and ``torch``, are always enabled.
VARIABLE = "AIAKQ_KERNELS"

REFERENCES = ("reference", "torch")


class OtherDevice(str):
    """The reason of an implementation for another kind of device, which is not worth reporting."""


@dataclass(frozen=True)
class Selection:
    """The implementation selected for a problem, and the reason why each preferred one was passed over."""

    name: str
    passed_over: tuple[tuple[str, str], ...]


def allowed(name: str, operation: str | None = None) -> bool:
    """Whether the environment enables implementation ``name``, for one operation or for any."""
    entries = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    operation_entries = [
        entry.partition("=")[2] for entry in entries if entry.partition("=")[0] == operation and "=" in entry
    ]
    names = operation_entries or [entry for entry in entries if "=" not in entry]
    return not names or name in names or name in REFERENCES


def select(
    operation: str, implementations: Registry, problem: object, exclude: Collection[str] = ()
) -> tuple[Selection, ModuleType]:
    """Ask implementations in order of preference; the last one is a reference that supports every problem.

    exclude  names that may not be selected.
    Raises PluginError if an implementation of another package cannot be imported.
    """
    passed_over: list[tuple[str, str]] = []
    for name in implementations:
        if name in exclude:
            reason: str | None = "excluded"
        elif not allowed(name, operation):
            reason = f"not in {VARIABLE}"
        else:
            module = implementations.load(name)
            reason = module.supports(problem)
            if reason is None:
                return Selection(name, tuple(passed_over)), module
        if not isinstance(reason, OtherDevice):
            passed_over.append((name, str(reason)))
    raise AssertionError(f"the reference must support every problem, but refused {problem}")
