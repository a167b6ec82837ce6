"""Activation functions by the names that configs use."""

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
}


def activation(name: str, ops: Ops) -> Activation:
    """The function that a config calls ``name``. Raises ``model_unsupported``."""
    if name not in _FUNCTIONS:
        raise error(
            "model_unsupported",
            architecture=f"activation {name}",
            reason="it is not known",
            known=", ".join(_FUNCTIONS),
        )
    return ops.activation(_FUNCTIONS[name])
