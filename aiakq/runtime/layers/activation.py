"""Activation functions by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F

from aiakq.errors import error
from aiakq.kernels import triton
from aiakq.kernels.cpu import rows
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.triton import rows as triton_layers
from aiakq.kernels.types import Rows, Wish


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: Name in configs -> (name of the native operation, function of torch).
_KNOWN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("silu", F.silu),
    "swish": ("silu", F.silu),
    "relu": ("relu", F.relu),
    "gelu": ("gelu", F.gelu),
    "gelu_new": ("gelu_tanh", _gelu_tanh),
    "gelu_pytorch_tanh": ("gelu_tanh", _gelu_tanh),
}


@dataclass
class Activation:
    """An activation function, alone or as the gate of another tensor; on a CPU the native operation where there is one.

    On a CPU torch computes the last elements of a tensor that do not fill a vector register in another way, so that a
    row's result depends on how many others there are; the native operation does not.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    _native: rows.NativeGate | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, x: Tensor, wish: Wish = None) -> Rows:
        """act(x) [..., I]; as whoever takes it wishes, if the kernel can."""
        if triton.usable(x) and x.dim() == 2:
            return triton_layers.gate(self.name, x, None, wish)
        native = self._for(x)
        return self.function(x) if native is None else native(x)

    def times(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, both [..., I]."""
        if triton.usable(gate) and gate.dim() == 2:
            return triton_layers.gate(self.name, gate, up)
        native = self._for(gate)
        return self.function(gate) * up if native is None else native(gate, up)

    def halves(self, both: Tensor, wish: Wish = None) -> Rows:
        """act of the first half of the columns, times the second: [M, 2 I] -> [M, I]; ``wish`` as above."""
        native = self._for(both)
        if native is not None:
            return native.halves(both)
        gate, up = both.chunk(2, dim=-1)
        return triton_layers.gate(self.name, gate, up, wish) if triton.usable(both) else self.function(gate) * up

    def _for(self, x: Tensor) -> rows.NativeGate | None:
        if not (x.is_cpu and x.dtype in TYPES and rows.available()):
            return None
        if self._native is None:
            self._native = rows.NativeGate(self.name)
        return self._native


def activation(name: str) -> Activation:
    """The function a config calls ``name``. Raises ``model_unsupported``."""
    if name not in _KNOWN:
        raise error(
            "model_unsupported", architecture=f"activation {name}", reason="it is not known", known=", ".join(_KNOWN)
        )
    return Activation(*_KNOWN[name])
