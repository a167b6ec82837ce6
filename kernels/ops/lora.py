"""LoRA adapters beside a linear layer: interface, torch reference and implementations.

Several adapters are in memory at once, each under the number of its slot, and every row of a step has one or none.
``bias`` [N] float32 is that of the base layer. A row's result does not depend on the other rows, and a row without an
adapter keeps its bits; the reference promises the latter only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import LinearInput


@dataclass(frozen=True)
class LoraProblem:
    """Adapters of a linear layer with N outputs and K inputs; ``dtype`` is that of the activations.

    slots     maximum number of adapters in memory.
    max_rank  of all parts of one adapter together.
    """

    n: int
    k: int
    slots: int
    max_rank: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class LoraPart:
    """What an adapter adds to the outputs ``first`` and up of a layer: d = scale * (b (a x) + bias), or with factors f
    y becomes y + f * (y - the base's bias) + (1 + f) * d.

    a [rank, K] and b [N, rank] of the same dtype; bias [N] or None; factors [N] float32 or None.
    """

    first: int
    scale: float
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in (self.a, self.b, self.bias, self.factors) if t is not None)

    def to(self, device: torch.device) -> LoraPart:
        """The part with its tensors on ``device``."""
        bias, factors = (None if each is None else each.to(device) for each in (self.bias, self.factors))
        return replace(self, a=self.a.to(device), b=self.b.to(device), bias=bias, factors=factors)


class SegmentView(Protocol):
    """The rows of a step by adapter, as an implementation keeps them."""

    def assign(self, segments: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Take over (slot, its rows), each slot once and no row twice."""


class AdapterRows:
    """Which rows of the current step have which adapter; one object for all layers.

    segments  (slot, its rows).
    any_rows  whether an operation that is recorded now (a CUDA graph) will run again for other rows than these.
    """

    any_rows: bool = False

    def __init__(self) -> None:
        self.segments: Sequence[tuple[int, Sequence[int]]] = ()
        self._views: dict[str, Any] = {}

    def assign(self, segments: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The rows of the next step."""
        if not segments and not self.segments:
            return
        self.segments = segments
        for view in self._views.values():
            view.assign(segments)

    def view(self, name: str, make: Callable[[], object]) -> Any:
        """The view of an implementation, made when it is asked for first: a SegmentView."""
        if name not in self._views:
            self._views[name] = make()
            self._views[name].assign(self.segments)
        return self._views[name]


class LoraProduct(Protocol):
    """The adapters of one layer."""

    def pack(self, parts: Sequence[LoraPart]) -> object:
        """What ``load`` takes of an adapter, in the host's memory. May be called in any thread."""

    def load(self, slot: int, packed: object) -> int:
        """Put an adapter into a slot, whose last one is dropped; returns its bytes."""

    def unload(self, slot: int) -> None:
        """Drop the adapter of a slot."""

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Add to y [M, N], which is modified, what the adapters of this step's rows make of x [M, K]."""


class TorchLora:
    """The reference."""

    def __init__(self, rows: AdapterRows, bias: Tensor | None, device: str = "cpu") -> None:
        self._rows, self._bias, self._device = rows, bias, torch.device(device)
        self._parts: dict[int, Sequence[LoraPart]] = {}

    def pack(self, parts: Sequence[LoraPart]) -> Sequence[LoraPart]:
        """See LoraProduct."""
        return parts

    def load(self, slot: int, packed: Sequence[LoraPart]) -> int:
        """See LoraProduct."""
        parts = self._parts[slot] = [part.to(self._device) for part in packed]
        return sum(part.nbytes for part in parts)

    def unload(self, slot: int) -> None:
        """See LoraProduct."""
        self._parts.pop(slot, None)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """x [M, K] and y [M, N]; see LoraProduct."""
        for slot, rows in self._rows.segments:
            at = torch.tensor(list(rows), device=x.device)
            own = x[at].float()
            for part in self._parts.get(slot, ()):
                columns = slice(part.first, part.first + len(part.b))
                before = y[at, columns].float()
                added = (own @ part.a.float().T * part.scale) @ part.b.float().T
                if part.bias is not None:
                    added = added + part.scale * part.bias.float()
                if part.factors is not None:
                    product = before if self._bias is None else before - self._bias[columns]
                    added = part.factors * product + (1 + part.factors) * added
                y[at, columns] = (before + added).to(y.dtype)


class AdaptedLinear(LinearLayer):
    """A linear layer with adapters: the base product, rounded as ever, then those of the rows that have one."""

    def __init__(
        self,
        base: LinearLayer,
        make: Callable[[AdapterRows], LoraProduct],
        rows: tuple[AdapterRows, AdapterRows],
    ) -> None:
        """make: a product for rows, which are those of tokens, or of logits after ``of_logit_rows``."""
        self.base, self._make, self._rows = base, make, rows
        self.product = make(rows[0])

    def of_logit_rows(self) -> None:
        """Said once, before anything is loaded: its rows are those of logits."""
        self.product = self._make(self._rows[1])

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], a Tensor -> [M, N]."""
        assert isinstance(x, Tensor)
        y = self.base(x)
        self.product(x, y)
        return y


class LoraKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, problem: LoraProblem, rows: AdapterRows, bias: Tensor | None) -> LoraProduct:
        """Bind the adapters of a layer with ``bias`` [N] float32."""


IMPLEMENTATIONS = Implementations[LoraKernel].of_backends("lora", "cpu", "triton")


def prepare(problem: LoraProblem, rows: AdapterRows, bias: Tensor | None) -> TorchLora:
    """bias [N] float32 of the base layer, or None."""
    return TorchLora(rows, bias, problem.device)
