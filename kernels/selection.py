"""Backends, and the selection of an operation's implementation.

A kind of device has one backend; variants for several instruction sets or generations are inside it. Its package has a
module per operation with ``prepare`` and, where that depends on more than the device and the dtypes, with
``supports(problem)``: None, or one sentence why not. What the backend does not have, torch computes. Modules of plugins
come first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from aiakq.kernels.registry import Registry

if TYPE_CHECKING:
    import torch

#: Environment variable that lists the enabled implementations, separated by commas: ``triton,cpu``, or for one
#: operation ``attention=torch``. The reference implementations, ``reference`` and ``torch``, are always enabled.
VARIABLE = "AIAKQ_KERNELS"

REFERENCES = ("reference", "torch")

Kernel = TypeVar("Kernel")


class KernelProblem(Protocol):
    """Describes an operation to implementations: the dtype of its activations, its kind of device, and sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""

    @property
    def device(self) -> str:
        """The kind of device."""


@dataclass(frozen=True)
class Backend:
    """The kernels for one kind of device.

    package  says in ``unsupported(problem)`` why it cannot compute at all, or with these dtypes.
    names    names of its implementations.
    """

    package: str
    names: Collection[str]

    def unsupported(self, problem: KernelProblem) -> str | None:
        """Return why no kernel of the backend can be used for ``problem``, or None."""
        reason: str | None = importlib.import_module(self.package).unsupported(problem)
        return reason


#: Kind of device -> its backend.
BACKENDS = {
    "cpu": Backend("aiakq.kernels.cpu", ("cpu",)),
    "cuda": Backend("aiakq.kernels.triton", ("triton", "triton-fp8", "triton-floats", "triton-w8a8")),
}


class Implementations(Registry[Kernel]):
    """The implementations of an operation, modules in order of preference, plugins first."""

    def __init__(self, operation: str, modules: Mapping[str, str]) -> None:
        """modules: name -> module. The entry points are those of the group ``aiakq.implementations.<operation>``, for
        linear layers ``aiakq.implementations``.
        """
        group = "aiakq.implementations" + ("" if operation == "linear" else f".{operation}")
        super().__init__(group, modules, plugins_first=True)
        self.operation = operation

    @classmethod
    def of_backends(cls, operation: str, *names: str) -> Self:
        """Return the modules ``operation`` of the backends with these implementations, and of the torch reference."""
        modules = {name: f"aiakq.kernels.{name}.{operation}" for name in names}
        return cls(operation, modules | {"torch": f"aiakq.kernels.ops.{operation}"})


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


def unsupported(name: str, kernel: object, problem: KernelProblem) -> str | None:
    """Return why the implementation ``name``, a module, does not support ``problem``, or None."""
    backend = BACKENDS.get(problem.device)
    if backend is not None and name in backend.names and (reason := backend.unsupported(problem)):
        return reason
    # Kernels written before weights had offsets do not know them, and would leave them out.
    if getattr(problem, "has_offsets", False) and not getattr(kernel, "HAS_OFFSETS", False):
        return "it has no offsets"
    supports = getattr(kernel, "supports", None)
    return None if supports is None else supports(problem)


def select(
    implementations: Implementations[Kernel], problem: KernelProblem, exclude: Collection[str] = ()
) -> tuple[Selection, Kernel]:
    """Ask implementations in order of preference; the last one is a reference that supports every problem.

    exclude  names that may not be selected.
    Raises PluginError if an implementation of another package cannot be imported.
    """
    passed_over: list[tuple[str, str]] = []
    own = BACKENDS[problem.device].names if problem.device in BACKENDS else ()
    for name in implementations:
        if name not in own and any(name in backend.names for backend in BACKENDS.values()):
            continue
        if name in exclude:
            reason = "excluded"
        elif not allowed(name, implementations.operation):
            reason = f"not in {VARIABLE}"
        else:
            kernel = implementations.load(name)
            refusal = unsupported(name, kernel, problem)
            if refusal is None:
                return Selection(name, tuple(passed_over)), kernel
            reason = refusal
        passed_over.append((name, reason))
    raise AssertionError(f"the reference must support every problem, but refused {problem}")
