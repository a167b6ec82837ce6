"""Binding: a weight that was read (or made up) -> a linear layer with the best kernel that may run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiakq.kernels import bind
from aiakq.kernels.cpu import dense as cpu_dense
from aiakq.kernels.types import QWeight
from aiakq.runtime.layers.linear import AnyLinear, Embedding, Linear, QLinear

#: (scheme, implementation, why each better one was passed over) -> number of layers.
Kinds = Counter[tuple[str, str, tuple[tuple[str, str], ...]]]


@dataclass
class Binder:
    """Makes linear layers for activations of ``dtype``, and notes what was bound to what.

    excluded  implementations that may not be chosen (see ``--dequantize``); without ``cpu``, dense ones are torch's.
    exact     see LinearProblem (``--cpu-math exact``).
    """

    dtype: torch.dtype
    device: torch.device
    excluded: frozenset[str] = frozenset()
    exact: bool = True
    kinds: Kinds = field(default_factory=Counter)

    def bound(self, weight: QWeight, count: int = 1) -> QLinear:
        """A layer of a quantized weight, which stands for ``count`` of the checkpoint's."""
        bound = bind(weight.to(self.device), weight.problem(self.dtype, self.device, self.exact), self.excluded)
        self.kinds[(weight.scheme, bound.choice.name, bound.choice.passed_over)] += count
        return QLinear(bound)

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> AnyLinear:
        """A layer of a weight [N, K], kept in its own dtype where a kernel takes that."""
        reason = "not wanted" if "cpu" in self.excluded else cpu_dense.supports(weight, self.dtype)
        if reason is None:
            self.kinds[("w16", "cpu", ())] += count
            return cpu_dense.prepare(weight, bias, self.dtype)
        self.kinds[("w16", "torch", (("cpu", reason),) if self.device.type == "cpu" else ())] += count
        weight = weight.to(device=self.device, dtype=self.dtype)
        return Linear(weight, None if bias is None else bias.to(device=self.device, dtype=self.dtype))

    def embedded(self, table: Tensor, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        """The embedding of a table [V, D] and, if the head is tied to it, the head: one copy of the weight."""
        if not tied:
            return Embedding(table.to(self.device), self.dtype), None
        head = self.dense(table)
        return Embedding(head.weight if isinstance(head, Linear) else head, self.dtype), head

    @property
    def all_native(self) -> bool:
        """Whether every layer so far runs in the native CPU library."""
        return all(name == "cpu" for _, name, _ in self.kinds)


def stacked(weights: Sequence[QWeight]) -> QWeight | None:
    """Weights of equal K as one, the first's outputs first; None if they are not stored alike."""
    first = weights[0]

    def alike(weight: QWeight) -> bool:
        pairs = [(weight.perm, first.perm), (weight.input_scale, first.input_scale)]
        return (
            (weight.scheme, weight.k, weight.group_size) == (first.scheme, first.k, first.group_size)
            and weight.scales.dtype == first.scales.dtype
            and (weight.zeros is None) == (first.zeros is None)
            and (weight.zeros is None or first.zeros is None or weight.zeros.dtype == first.zeros.dtype)
            and (weight.bias is None) == (first.bias is None)
            and all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)
        )

    if not all(alike(weight) for weight in weights):
        return None

    def joined(name: str) -> Tensor | None:
        return None if getattr(first, name) is None else torch.cat([getattr(weight, name) for weight in weights])

    return QWeight(
        scheme=first.scheme,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=joined("zeros"),
        perm=first.perm,
        bias=joined("bias"),
        group_size=first.group_size,
        input_scale=first.input_scale,
    )
