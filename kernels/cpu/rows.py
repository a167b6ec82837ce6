"""Operations on rows of activations in the native library: normalization, activation functions, embeddings.

Each is an object made once, with the operation's struct in it; a call fills in where its tensors are. A row's result
does not depend on the other rows. Whoever has no library, or a tensor elsewhere, computes it with torch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES

#: ActivationFunction, in the order of src/ops.def.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")

#: Below so many elements one thread is quicker than waking others.
SHARED_FROM = 1 << 16


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the library can be used; asked once."""
    return library.unavailable() is None


def _threads(elements: int) -> int:
    return 1 if elements < SHARED_FROM else 0


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [M, D] whose rows are each in one piece; a copy only where it must be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class NativeNorm:
    """x / rms(x) * weight, or with ``centered`` (x - mean) / deviation * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool) -> None:
        self.weight = weight.float().contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.op = op = library.new_op("norm")
        op.d, op.centered, op.epsilon = weight.shape[0], centered, epsilon
        op.weight, op.bias = library.address(self.weight), library.address(self.bias)
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., D] in float32, float16 or bfloat16 -> the same; ``residual`` is added to x, in place, first."""
        op = self.op
        rows = _rows(x)
        if residual is None:
            op.residual = None
        elif rows.data_ptr() != x.data_ptr():  # a copy: what is added must go to x itself
            return self(x.add_(residual))
        else:
            added = _rows(residual)
            op.residual, op.residual_stride = added.data_ptr(), added.stride(0)
        y = torch.empty_like(rows)
        op.m, op.x_type = rows.shape[0], TYPES[x.dtype]
        op.x, op.x_stride, op.y, op.y_stride = rows.data_ptr(), rows.stride(0), y.data_ptr(), y.stride(0)
        self.ops(_threads(rows.numel()))
        return y if x.dim() == 2 else y.view(x.shape)


class NativeGate:
    """act(gate) * up, or an activation alone."""

    def __init__(self, activation: str) -> None:
        self.op = op = library.new_op("activation")
        op.function = ACTIVATIONS.index(activation)
        self.ops = library.OpList(op)

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate and up [..., I] of the same shape and dtype -> [..., I]."""
        op = self.op
        rows = _rows(gate)
        if up is None:
            op.up = None
        else:
            others = _rows(up)
            op.up, op.up_stride = others.data_ptr(), others.stride(0)
        y = self._to(rows, rows.shape[1])
        return y if gate.dim() == 2 else y.view(gate.shape)

    def halves(self, both: Tensor) -> Tensor:
        """act of the first half of the columns, times the second: [M, 2 I] -> [M, I]."""
        op = self.op
        rows = _rows(both)
        columns = rows.shape[1] // 2
        op.up, op.up_stride = rows.data_ptr() + columns * rows.element_size(), rows.stride(0)
        return self._to(rows, columns)

    def _to(self, gate: Tensor, columns: int) -> Tensor:
        op = self.op
        m = gate.shape[0]
        y = torch.empty(m, columns, dtype=gate.dtype)
        op.m, op.columns, op.type = m, columns, TYPES[gate.dtype]
        op.gate, op.gate_stride, op.y, op.y_stride = gate.data_ptr(), gate.stride(0), y.data_ptr(), columns
        self.ops(_threads(m * columns))
        return y


class NativeEmbedding:
    """Rows of a table [V, D], which may be in the tiles of a product (aiakq_pack_floats; bfloat16 in pairs)."""

    def __init__(self, table: Tensor, vocabulary: int, d: int, tiled: bool, dtype: torch.dtype) -> None:
        self.table, self.dtype = table.contiguous(), dtype
        self.op = op = library.new_op("embedding")
        op.d, op.vocabulary, op.tiled, op.table = d, vocabulary, tiled, self.table.data_ptr()
        op.table_type, op.y_type, op.y_stride = TYPES[table.dtype], TYPES[dtype], d
        self.ops = library.OpList(op)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [M] int64 -> [M, D]; the row of an id that is not there is NaN."""
        op = self.op
        ids = ids.contiguous()
        y = torch.empty(len(ids), op.d, dtype=self.dtype)
        op.m, op.ids, op.y = len(ids), ids.data_ptr(), y.data_ptr()
        self.ops(_threads(y.numel()))
        return y


class NativeSelection:
    """Rows of activations, by their numbers."""

    def __init__(self) -> None:
        self.op = op = library.new_op("embedding")
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, numbers: Tensor) -> Tensor:
        """x [M, D], numbers [R] int64 -> [R, D]; a row that is not there is NaN."""
        op = self.op
        x, numbers = _rows(x).contiguous(), numbers.contiguous()
        y = torch.empty(len(numbers), x.shape[1], dtype=x.dtype)
        op.d, op.vocabulary, op.table = x.shape[1], len(x), x.data_ptr()
        op.table_type = op.y_type = TYPES[x.dtype]
        op.m, op.ids, op.y, op.y_stride = len(numbers), numbers.data_ptr(), y.data_ptr(), x.shape[1]
        self.ops(_threads(y.numel()))
        return y
