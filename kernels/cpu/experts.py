"""CPU experts: the products of all experts that have rows, and the activation function, in one library call.

It runs the same operations as the individual layers, so results are bit-identical to theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import Structure
from typing import TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.activation import NativeActivation
from aiakq.kernels.cpu.dense import NativeDense
from aiakq.kernels.cpu.library import TYPES, OpList
from aiakq.kernels.cpu.linear import NativeLinear
from aiakq.kernels.ops.experts import ExpertLayers, GroupedExperts, TorchExperts
from aiakq.kernels.types import ExpertsProblem


def prepare(layers: ExpertLayers, problem: ExpertsProblem) -> GroupedExperts:
    """Run all layers in one native call if they are native, else one after the other."""
    first, second = (
        [layer for layer in group if isinstance(layer, NativeDense | NativeLinear)]
        for group in (layers.first, layers.second)
    )
    if isinstance(layers.act, NativeActivation) and len(first) + len(second) == 2 * len(layers.first):
        return NativeExperts(first, second, layers.act, problem.dtype, layers.gated)
    return TorchExperts(layers)


_NativeLayers: TypeAlias = Sequence[NativeDense | NativeLinear]


class NativeExperts(GroupedExperts):
    """Native experts; the interface is GroupedExperts in ops/experts.py. Activations have dtype ``dtype``."""

    def __init__(
        self,
        first: _NativeLayers,
        second: _NativeLayers,
        activation: NativeActivation,
        dtype: torch.dtype,
        gated: bool,
    ) -> None:
        self._layers, self._dtype = (first, second), dtype  # the operations point to the weights
        self._first, self._second = self._copies(first), self._copies(second)
        self._k, self._width, self._n = self._first[0].k, self._first[0].n, self._second[0].n
        self._act = act = type(activation.op).from_buffer_copy(activation.op)
        self._mid = self._width // 2 if gated else self._width
        act.type, act.columns, act.up = TYPES[dtype], self._mid, None
        act.gate_stride, act.up_stride, act.y_stride = self._width, self._width if gated else 0, self._mid
        native = library.load_library()
        max_scratch = max(native.scratch_bytes(op) for op in (*self._first, *self._second))
        self._scratch_per_row = -(-max_scratch // 64) * 64
        # Held while the fields of the operations are set and used by one call.
        self._lock = threading.Lock()

    def _copies(self, layers: _NativeLayers) -> list[Structure]:
        """Return copies of the operations of ``layers``, for contiguous rows."""
        copies = [type(layer.op).from_buffer_copy(layer.op) for layer in layers]
        for op in copies:
            op.x_type = op.y_type = TYPES[self._dtype]
            op.x_stride, op.y_stride = op.k, op.n
        return copies

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] -> [S, N]; see GroupedExperts."""
        if x.shape != (sum(counts), self._k) or len(counts) != len(self._first) or x.dtype != self._dtype:
            raise ValueError(f"{list(x.shape)} in {x.dtype} for {len(self._first)} experts of {sum(counts)} rows")
        x, rows = x.contiguous(), len(x)
        both, mid, y = (torch.empty(rows, width, dtype=x.dtype) for width in (self._width, self._mid, self._n))
        scratch, size, act = library.allocate_scratch(rows * self._scratch_per_row), x.element_size(), self._act
        with self._lock:
            act.m, act.gate, act.y = rows, both.data_ptr(), mid.data_ptr()
            if self._mid != self._width:
                act.up = both.data_ptr() + self._mid * size
            first = self._placed(self._first, counts, x, both, scratch)
            second = self._placed(self._second, counts, mid, y, scratch)
            OpList(*first, act, *second)()
        return y

    def _placed(
        self, ops: Sequence[Structure], counts: Sequence[int], x: Tensor, y: Tensor, scratch: Tensor
    ) -> list[Structure]:
        """Return those of ``ops`` that have rows, pointing to their rows of x [S, K] and y [S, N]."""
        placed = []
        start, size = 0, x.element_size()
        from_x, from_y, from_scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
        x_bytes, y_bytes = x.shape[1] * size, y.shape[1] * size
        for op, count in zip(ops, counts, strict=True):
            if count:
                op.m, op.x, op.y = count, from_x + start * x_bytes, from_y + start * y_bytes
                op.scratch = from_scratch + start * self._scratch_per_row
                placed.append(op)
                start += count
        return placed
