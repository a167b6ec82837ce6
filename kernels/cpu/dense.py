"""CPU linear layers without quantization, with weights in their stored dtype.

Accumulation is float32 for all dtypes of weights and activations, so bf16 weights with float32 activations take half
the memory of float32 weights without loss of accuracy. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.embedding import NativeEmbedding
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.cpu.memory import empty_on_large_pages
from aiakq.kernels.ops.dense import DenseLayer
from aiakq.kernels.types import DenseProblem, LinearInput

TILE = 32
#: See ops/linear.py.
ROW_MULTIPLE = 1


class NativeDense(DenseLayer):
    """A weight [N, K] packed into tiles, and the operation that multiplies with it.

    tiles  [ceil(N / 32), K / 2, 32, 2] for bfloat16, else [ceil(N / 32), K, 32, 1].
    bias   [N padded to 32] float32, or None.
    """

    def __init__(self, op: Structure, tiles: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.op, self.ops, self.scratch_per_row = op, OpList(op), load_library().scratch_bytes(op)
        # The operation points to these tensors.
        self.tiles, self.bias = tiles, bias
        self.dtype = dtype

    def __call__(self, x: LinearInput) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        assert isinstance(x, Tensor)
        if x.dim() == 2:
            return library.matmul(x, self.op, self.ops, self.scratch_per_row)
        return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def embedding(self) -> NativeEmbedding:
        """Return a lookup of the weight's rows that reads them from the tiles."""
        return NativeEmbedding(self.tiles, self.op.n, self.op.k, True, self.dtype)


def prepare(weight: Tensor, bias: Tensor | None, problem: DenseProblem) -> NativeDense:
    """Pack ``weight`` [N, K] (not modified) into tiles."""
    op, tiles = pack(weight)
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, -op.n % TILE)).contiguous()
    op.bias = address(bias)
    return NativeDense(op, tiles, bias, problem.dtype)


def pack(weight: Tensor) -> tuple[Structure, Tensor]:
    """Return the operation that multiplies with ``weight`` [N, K] (not modified), and the tiles it points to."""
    n, k = weight.shape
    pairs = weight.dtype == torch.bfloat16
    width = 2 if pairs else 1
    tiles = empty_on_large_pages(-(-n // TILE), -(-k // width), TILE, width, dtype=weight.dtype)
    weight = weight.contiguous()
    load_library().cdll.aiakq_pack_floats(
        weight.data_ptr(), n, k, weight.element_size(), pairs, tiles.data_ptr(), torch.get_num_threads()
    )
    op = new_op("dense")
    op.n, op.k, op.batch, op.weight_type = n, k, 1, TYPES[weight.dtype]
    op.tiles = address(tiles)
    return op, tiles
