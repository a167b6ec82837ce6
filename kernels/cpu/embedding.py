"""CPU embedding lookup, and gathering of activation rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import as_rows, threads_for
from aiakq.kernels.types import EmbeddingProblem


def prepare(table: Tensor, problem: EmbeddingProblem) -> NativeEmbedding:
    """Prepare the lookup; table [V, D] is copied only if it is not contiguous."""
    vocabulary, d = table.shape
    return NativeEmbedding(table, vocabulary, d, False, problem.dtype)


def row_selection(problem: EmbeddingProblem) -> NativeRowSelection:
    """Prepare the selection of rows of activations by index."""
    return NativeRowSelection()


class NativeEmbedding:
    """Lookup in a table [V, D], possibly stored as tiles of a dense layer (aiakq_pack_floats; bfloat16 in pairs)."""

    #: What the operation points to, besides the table.
    memory: tuple[object, ...] = ()

    def __init__(self, table: Tensor, vocabulary: int, d: int, tiled: bool, dtype: torch.dtype) -> None:
        self.table, self.dtype = table.contiguous(), dtype
        self.op = op = library.new_op("embedding")
        op.d, op.vocabulary, op.tiled, op.table = d, vocabulary, tiled, self.table.data_ptr()
        op.table_type, op.y_type, op.y_stride = TYPES[table.dtype], TYPES[dtype], d
        self.ops = library.OpList(op)

    @classmethod
    def of_linear(cls, linear: Structure, tensors: Sequence[Tensor], dtype: torch.dtype) -> NativeEmbedding:
        """Return a lookup of rows of the weight [V, D] of a quantized product, which points to ``tensors``."""
        lookup = cls(tensors[0], linear.n, linear.k, False, dtype)
        lookup.op.linear, lookup.memory = ctypes.addressof(linear), (linear, *tensors)
        return lookup

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [M] int64 -> [M, D]; the row of an id outside the table is NaN."""
        op = self.op
        ids = ids.contiguous()
        y = torch.empty(len(ids), op.d, dtype=self.dtype)
        with self.ops.lock:
            op.m, op.ids, op.y = len(ids), ids.data_ptr(), y.data_ptr()
            self.ops(threads_for(y.numel()))
        return y


class NativeRowSelection:
    """Selects rows of activations by index."""

    def __init__(self) -> None:
        self.op = op = library.new_op("embedding")
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [M, D] and rows [R] int64 -> [R, D]; rows with an index out of range are NaN."""
        op = self.op
        x, rows = as_rows(x).contiguous(), rows.contiguous()
        y = torch.empty(len(rows), x.shape[1], dtype=x.dtype)
        with self.ops.lock:
            op.d, op.vocabulary, op.table = x.shape[1], len(x), x.data_ptr()
            op.table_type = op.y_type = TYPES[x.dtype]
            op.m, op.ids, op.y, op.y_stride = len(rows), rows.data_ptr(), y.data_ptr(), x.shape[1]
            self.ops(threads_for(y.numel()))
        return y
