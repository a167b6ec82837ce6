"""Activation functions, by the names used in config.json."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.types import ActivationLayout, LinearInput

#: Name in configs -> name of the function in kernels/ops/activation.py.
_FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}


def activation(name: str, ops: Ops) -> Activation:
    """Return the activation function for the name used in config.json. Raises ``unsupported``."""
    return ops.activation(function_name(name))


def function_name(name: str) -> str:
    """Return the name in kernels/ops/activation.py for the name used in config.json. Raises ``unsupported``."""
    if name not in _FUNCTIONS:
        what = f"The activation function {name!r:.64} (in config.json)"
        hint = f"Supported: {', '.join(_FUNCTIONS)}; or use --model-impl transformers."
        raise error("unsupported", what=what, hint=hint)
    return _FUNCTIONS[name]


class ClampedActivation:
    """An activation function of values of ``limit`` at most; what it gates is between -limit and limit."""

    def __init__(self, inner: Activation, limit: float) -> None:
        self._inner, self._limit = inner, limit

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """x [M, I] -> [M, I]; see Activation."""
        return self._inner(x.clamp(max=self._limit), layout)

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """x [M, 2 I] -> [M, I]; see Activation."""
        gate, up = x.chunk(2, dim=1)
        both = torch.cat([gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)], dim=1)
        return self._inner.gated(both, layout)
