"""ExpertStack: quantized linears of experts that a checkpoint holds in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.spec import LayerSpec


@dataclass(frozen=True)
class ExpertStack:
    """``count`` linears with N outputs and K inputs each, quantized as ``layer`` says."""

    count: int
    n: int
    k: int
    layer: LayerSpec

    @property
    def weights(self) -> int:
        """Number of weights of all experts."""
        return self.count * self.n * self.k

    @property
    def scheme(self) -> str:
        """The arithmetic; see QuantSpec."""
        return f"{'w' if self.layer.table is None else 'lut'}{self.layer.bits}a16"
