"""Unquantized linear layers on the CPU through the native library, their weights in the dtype they are stored in.

Sums are float32 whatever the weights and the activations are, so bf16 weights with float32 activations cost half the
memory of float32 ones and lose nothing. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op

TILE = 32


def supports(weight: Tensor, dtype: torch.dtype) -> str | None:
    """None, or why not."""
    if weight.device.type != "cpu":
        return "it runs on CPUs"
    if weight.dtype not in TYPES or dtype not in TYPES or not weight.is_floating_point():
        return f"no weights in {weight.dtype} with activations in {dtype}"
    return library.unavailable()


@dataclass
class NativeDense:
    """A weight [N, K] in tiles and the operation that multiplies with it; ``bias`` is what that points to.

    tiles  [ceil(N / 32), K / 2, 32, 2] for bf16, else [ceil(N / 32), K, 32, 1].
    """

    op: Structure
    ops: OpList
    scratch_per_row: int
    tiles: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        if x.dim() == 2:
            return run(x, self)
        return run(x.reshape(-1, x.shape[-1]), self).view(*x.shape[:-1], -1)


def prepare(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> NativeDense:
    """Bring ``weight`` [N, K] (not modified) into tiles, for activations of ``dtype``."""
    n, k = weight.shape
    pairs = weight.dtype == torch.bfloat16
    width = 2 if pairs else 1
    tiles = library.empty_on_large_pages(-(-n // TILE), -(-k // width), TILE, width, dtype=weight.dtype)
    weight = weight.contiguous()
    load_library().cdll.aiakq_pack_floats(
        weight.data_ptr(), n, k, weight.element_size(), pairs, tiles.data_ptr(), torch.get_num_threads()
    )
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, -n % TILE)).contiguous()
    op = new_op("dense")
    op.n, op.k, op.weight_type = n, k, TYPES[weight.dtype]
    op.tiles, op.bias = address(tiles), address(bias)
    return NativeDense(op, OpList(op), load_library().scratch_bytes(op), tiles, bias)


def run(x: Tensor, state: NativeDense) -> Tensor:
    """x [M, K] -> [M, N], both of the dtype it was prepared for."""
    return library.matmul(x, state.op, state.ops, state.scratch_per_row)
