"""Activation functions, by the names used in config.json."""

from __future__ import annotations

from aiakq.errors import error
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation

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
