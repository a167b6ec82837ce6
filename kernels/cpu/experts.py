"""CPU experts: sorting, products, activation function and weighted sums of a whole mixture as one native operation.

It computes what the individual layers do, so results are bit-identical to theirs; see src/experts_kernel.cpp.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import Structure
from typing import TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.activation import NativeActivation
from aiakq.kernels.cpu.dense import NativeDense
from aiakq.kernels.cpu.library import TYPES, OpList, address
from aiakq.kernels.cpu.linear import NativeLinear
from aiakq.kernels.ops.experts import ExpertLayers, GroupedExperts, Routed, TorchExperts
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
        self._mixture = self._new_mixture()
        self._mixture_ops = OpList(self._mixture)

    def _new_mixture(self) -> Structure:
        """Return the operation over all experts, which points to the layers' operations and to memory of its own."""
        op = library.new_op("experts")
        op.experts, op.k, op.width, op.n = len(self._first), self._k, self._width, self._n
        op.type, op.scratch_per_row = TYPES[self._dtype], self._scratch_per_row
        self._starts = torch.empty(op.experts + 1, dtype=torch.int32)
        self._tables = [
            (ctypes.c_void_p * len(group))(*(ctypes.addressof(each) for each in group))
            for group in (self._first, self._second)
        ]
        op.starts = address(self._starts)
        op.first, op.second = (ctypes.addressof(table) for table in self._tables)
        op.act = ctypes.addressof(self._act)
        return op

    def output(self, x: Tensor, routed: Routed, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]; see GroupedExperts."""
        op, (m, top_k) = self._mixture, routed.selected.shape
        for rows, width in ((x, self._k), (shared, self._n), (gate, 1)):
            if rows is not None and (rows.shape != (m, width) or rows.stride(1) != 1 or rows.dtype != self._dtype):
                raise ValueError(f"rows {list(rows.shape)} in {rows.dtype} for {m} tokens")
        if routed.count != op.experts or not (routed.selected.is_contiguous() and routed.weights.is_contiguous()):
            raise ValueError(f"{routed.count} experts instead of {op.experts}, or indices that are not contiguous")
        count = m * top_k
        sizes = (self._k, self._width, self._mid, self._n)
        rows, both, mid, outputs = (torch.empty(count, width, dtype=x.dtype) for width in sizes)
        pairs, places = (torch.empty(count, dtype=torch.int32) for _ in range(2))
        scratch, y = library.allocate_scratch(count * self._scratch_per_row), torch.empty(m, self._n, dtype=x.dtype)
        with self._mixture_ops.lock:
            op.m, op.top_k, op.weigh_inputs = m, top_k, routed.weigh_inputs
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), self._n
            op.selected, op.weights = routed.selected.data_ptr(), routed.weights.data_ptr()
            op.shared, op.shared_stride = (None, 0) if shared is None else (shared.data_ptr(), shared.stride(0))
            op.gate, op.gate_stride = (None, 0) if gate is None else (gate.data_ptr(), gate.stride(0))
            op.pairs, op.places, op.rows, op.both = (each.data_ptr() for each in (pairs, places, rows, both))
            op.mid, op.outputs, op.scratch = mid.data_ptr(), outputs.data_ptr(), scratch.data_ptr()
            self._mixture_ops()
        return y

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
