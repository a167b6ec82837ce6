"""CPU products of LoRA adapters, in their stored dtype, with sums in float32.

A row's result does not depend on the other rows. Without a row that has an adapter, the operation returns at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem

TILE = 32


class NativeSegments:
    """The rows of a step by adapter; ``struct`` stays where it is."""

    def __init__(self) -> None:
        self.struct = load_library().structs["LoraSegments"]()
        self._memory: Any = None

    def assign(self, segments: Sequence[tuple[int, Sequence[int]]]) -> None:
        """See SegmentView."""
        slots: list[int] = []
        starts, rows = [0], list[int]()
        for slot, own in segments:
            slots.append(slot)
            rows += own
            starts.append(len(rows))
        memory = [(ctypes.c_int32 * len(numbers))(*numbers) for numbers in (slots, starts, rows)]
        struct = self.struct
        struct.count = len(slots)
        struct.slots, struct.starts, struct.rows = map(ctypes.addressof, memory)
        self._memory = memory


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter of one layer as the kernel reads it.

    weights  its native struct.
    memory   what that points to.
    """

    weights: Any
    memory: Any
    nbytes: int


class NativeLora:
    """The adapters of one layer; the interface is LoraProduct in ops/lora.py."""

    def __init__(self, problem: LoraProblem, rows: AdapterRows, bias: Tensor | None) -> None:
        native = load_library()
        self._rows, self._problem = rows, problem
        self._weights = (native.structs["LoraWeights"] * problem.slots)()
        self._memory: dict[int, Any] = {}
        self._bias = None if bias is None else F.pad(bias.float(), (0, -problem.n % TILE)).contiguous()
        segments: NativeSegments = rows.view("cpu", NativeSegments)
        self.op = op = new_op("lora")
        op.n, op.k, op.max_rank = problem.n, problem.k, problem.max_rank
        op.segments, op.weights = ctypes.addressof(segments.struct), ctypes.addressof(self._weights)
        op.base_bias = address(self._bias)
        self._ops, self._scratch_per_row = OpList(op), native.scratch_bytes(op)

    def pack(self, parts: Sequence[LoraPart]) -> PackedAdapter:
        """See LoraProduct."""
        problem, native = self._problem, load_library()
        weights = native.structs["LoraWeights"]()
        if not parts:
            return PackedAdapter(weights, None, 0)
        type_ = parts[0].a.dtype
        a = _interleaved(F.pad(torch.cat([part.a for part in parts]), (0, -problem.k % 16)))
        scales = torch.cat([torch.full((len(part.a),), part.scale) for part in parts])
        kept: list[Tensor] = [a, scales]
        structs = (native.structs["LoraPart"] * len(parts))()
        first_rank = tiles = 0
        for part, struct in zip(parts, structs, strict=True):
            n, rank = part.b.shape
            assert part.a.dtype == part.b.dtype == type_ and part.a.shape == (rank, problem.k)
            assert 0 <= part.first <= part.first + n <= problem.n
            padding = (0, -n % TILE)
            b = F.pad(part.b.T, padding).view(rank, -1, TILE).transpose(0, 1).contiguous()
            bias = None if part.bias is None else F.pad(part.bias.float() * part.scale, padding).contiguous()
            factors = None if part.factors is None else F.pad(part.factors.float(), padding).contiguous()
            struct.first, struct.n, struct.first_rank, struct.rank = part.first, n, first_rank, rank
            struct.b, struct.bias, struct.factors = address(b), address(bias), address(factors)
            kept += [tensor for tensor in (b, bias, factors) if tensor is not None]
            first_rank, tiles = first_rank + rank, tiles + len(b)
        assert first_rank <= problem.max_rank, "an adapter's rank is checked before"
        weights.a, weights.scales, weights.part = address(a), address(scales), ctypes.addressof(structs)
        weights.type, weights.rank, weights.tiles, weights.parts = TYPES[type_], first_rank, tiles, len(parts)
        return PackedAdapter(weights, (structs, kept), sum(tensor.nbytes for tensor in kept))

    def load(self, slot: int, packed: PackedAdapter) -> int:
        """See LoraProduct."""
        self._weights[slot], self._memory[slot] = packed.weights, packed.memory
        return packed.nbytes

    def unload(self, slot: int) -> None:
        """See LoraProduct."""
        weights = self._weights[slot]
        weights.rank = weights.tiles = weights.parts = 0
        self._memory.pop(slot, None)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """x [M, K] and y [M, N]; see LoraProduct."""
        if not self._rows.segments and library.of_thread.recorder is None:
            return
        op, problem = self.op, self._problem
        if x.shape[1] != problem.k or y.shape != (len(x), problem.n) or y.dtype != x.dtype or y.stride(1) != 1:
            raise ValueError(f"rows {list(x.shape)} in {x.dtype} beside {list(y.shape)} in {y.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        scratch = library.allocate_scratch(len(x) * self._scratch_per_row)
        with self._ops.lock:
            op.m, op.x_type, op.y_type = len(x), TYPES[x.dtype], TYPES[y.dtype]
            op.x, op.y, op.scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
            op.x_stride, op.y_stride = x.stride(0), y.stride(0)
            self._ops()


def _interleaved(a: Tensor) -> Tensor:
    """Rearrange a [rank, K], K a multiple of 16, for blocks of 4 ranks and the last ones in blocks of 2 and 1, each
    [K / 16, ranks of the block, 16].
    """
    blocks, first = [], 0
    for size in (4, 2, 1):
        count = (len(a) - first) // size * size
        block = a[first : first + count].view(-1, size, a.shape[1] // 16, 16)
        blocks.append(block.transpose(1, 2).reshape(-1))
        first += count
    return torch.cat(blocks)


def prepare(problem: LoraProblem, rows: AdapterRows, bias: Tensor | None) -> NativeLora:
    """bias [N] float32 of the base layer, or None."""
    return NativeLora(problem, rows, bias)
