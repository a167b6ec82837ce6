"""Kernels: whose code computes a scheme. Imported as ``aiakq.kernels``; imports nothing from aiakq.

``IMPLEMENTATIONS`` lists the candidates, fastest first, as lazy module paths. A module offers

    supports(problem) -> None, or one sentence why not
    prepare(weight, problem) -> state        the implementation's private layout, made once at load
    run(x, state) -> y                       x [M, K] float -> y [M, N] of the same dtype

and may offer ``wish(state, m)``: how M rows of activations had better be made for it; ``run`` takes such, too.

Adding one is a new module and one line here; ``tests/kernels`` runs every entry over the same tables.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Nothing is needed to import this: transformers may, looking for another package of the name from this folder's parent.
if TYPE_CHECKING:
    from torch import Tensor

    from aiakq.kernels.types import LinearProblem, QWeight, Rows, Wish

__version__ = "0.1.0"  # transformers looks for a package named "kernels"; a version keeps it from stumbling

#: name -> module, in order of preference.
IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "aiakq.kernels.cpu.linear",
    "triton": "aiakq.kernels.triton.linear",
    "triton-w8a8": "aiakq.kernels.triton.linear_int8",
    "dequantized": "aiakq.kernels.ops.dequantized",
    "reference": "aiakq.kernels.ops.linear_reference",
}


#: Where an implementation runs, if not everywhere; elsewhere it is not even asked.
DEVICES = {"cpu": "cpu", "triton": "cuda", "triton-w8a8": "cuda"}

#: Names the implementations that may be used, separated by commas; ``reference`` may always be. For tests.
VARIABLE = "AIAKQ_KERNELS"


def allowed(name: str) -> bool:
    """Whether the environment lets this implementation be used."""
    names = os.environ.get(VARIABLE)
    return not names or name in (*names.split(","), "reference")


@dataclass(frozen=True)
class Choice:
    """The implementation bound to a problem, and why each better one was passed over."""

    name: str
    passed_over: tuple[tuple[str, str], ...]


@dataclass
class BoundLinear:
    """A quantized weight in its implementation's layout, ready to run."""

    choice: Choice
    module: ModuleType
    state: Any

    def __call__(self, x: Rows) -> Tensor:
        return self.module.run(x, self.state)

    def wish(self, m: int) -> Wish:
        """How ``m`` rows of activations had better be made, by what computes them."""
        offered = getattr(self.module, "wish", None)
        return None if offered is None else offered(self.state, m)


def explain(problem: LinearProblem, exclude: frozenset[str] = frozenset()) -> Choice:
    """Which implementation would run ``problem``, and why not a faster one; binds nothing."""
    passed_over: list[tuple[str, str]] = []
    for name, path in IMPLEMENTATIONS.items():
        if DEVICES.get(name, problem.device) != problem.device:
            continue
        if name in exclude or not allowed(name):
            passed_over.append((name, "not wanted" if name in exclude else f"not in {VARIABLE}"))
            continue
        reason = importlib.import_module(path).supports(problem)
        if reason is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, reason))
    raise AssertionError(f"reference must accept every problem, but refused {problem}")


def bind(weight: QWeight, problem: LinearProblem, exclude: frozenset[str] = frozenset()) -> BoundLinear:
    """Choose an implementation for ``problem`` and hand it ``weight``; the canonical copy may then be dropped."""
    choice = explain(problem, exclude)
    module = importlib.import_module(IMPLEMENTATIONS[choice.name])
    return BoundLinear(choice, module, module.prepare(weight, problem))
