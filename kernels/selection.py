"""Selects the implementation of an operation: the first in its registry that is enabled and supports the problem."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from aiakq.kernels.registry import Registry

#: Names the implementations that may be used, separated by commas: ``triton,cpu``, or for one operation only
#: ``attention=torch``. The reference implementations, ``reference`` and ``torch``, always may.
VARIABLE = "AIAKQ_KERNELS"

REFERENCES = ("reference", "torch")


class OtherDevice(str):
    """The reason of an implementation that is made for another kind of device. Nobody needs to be told."""


@dataclass(frozen=True)
class Selection:
    """The implementation selected for a problem, and why each better one was passed over."""

    name: str
    passed_over: tuple[tuple[str, str], ...]


def allowed(name: str, operation: str | None = None) -> bool:
    """Whether the environment lets implementation ``name`` be used, for one operation or for any."""
    entries = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    own = [entry.partition("=")[2] for entry in entries if entry.partition("=")[0] == operation and "=" in entry]
    names = own or [entry for entry in entries if "=" not in entry]
    return not names or name in names or name in REFERENCES


def select(
    operation: str, implementations: Registry, problem: Any, exclude: Collection[str] = ()
) -> tuple[Selection, ModuleType]:
    """Ask the implementations in order of preference; the last one is a reference that supports every problem.

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
