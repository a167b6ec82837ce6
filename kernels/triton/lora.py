"""Launcher of lora_kernel.py: LoRA adapters beside a linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import triton
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem
from aiakq.kernels.transfer import on_device

#: Rows of a tile, ranks and inputs or outputs of a program; parts of the inputs at most, and inputs of one at least.
ROWS, RANKS, INPUTS, OUTPUTS = 16, 16, 128, 64
MAX_SPLIT, MIN_INPUTS = 8, 512
#: Linear layers side by side in one; numbers of a line of the table (lora_kernel.py).
MAX_PARTS = 8
LINE = 5 + 7 * MAX_PARTS
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Rows and tiles that a CUDA graph may have.
CAPACITY = 4096


def supports(problem: LoraProblem) -> str | None:
    """None, or why not."""
    return triton.unsupported_dtype("LoRA", problem)


class TritonSegments:
    """The rows of a step as tiles in the GPU's memory.

    tiles, rows  of this step: [tiles, 3] and [rows] int32.
    count        the number of tiles.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Where a step fits, its numbers are here, because graphs read these.
        self._tiles = torch.zeros(CAPACITY, 3, dtype=torch.int32, device=device)
        self._rows = torch.zeros(CAPACITY, dtype=torch.int32, device=device)
        self.tiles, self.rows, self.count = self._tiles, self._rows, 0
        self._filled = 0

    def assign(self, segments: Sequence[tuple[int, Sequence[int]]]) -> None:
        """See SegmentView."""
        tiles: list[tuple[int, int, int]] = []
        rows: list[int] = []
        for slot, own in segments:
            first = len(rows)
            tiles += [(slot, first + at, min(ROWS, len(own) - at)) for at in range(0, len(own), ROWS)]
            rows += own
        self.count = len(tiles)
        if len(rows) > CAPACITY:
            self.tiles = on_device(tiles, self._device, torch.int32)
            self.rows = on_device(rows, self._device, torch.int32)
            return
        self.tiles, self.rows = self._tiles, self._rows
        # A graph looks at as many tiles as it has rows: those of earlier steps must be empty.
        tiles += [(0, 0, 0)] * (self._filled - len(tiles))
        self._filled = self.count
        if tiles:
            self._tiles[: len(tiles)] = on_device(tiles, self._device, torch.int32)
            self._rows[: len(rows)] = on_device(rows, self._device, torch.int32)


class TritonLora:
    """The adapters of one layer; the interface is LoraProduct in ops/lora.py."""

    def __init__(self, problem: LoraProblem, rows: AdapterRows, bias: Tensor | None, device: torch.device) -> None:
        self._problem, self._rows, self._device = problem, rows, device
        self._bias = None if bias is None else bias.float().to(device).contiguous()
        self._segments: TritonSegments = rows.view("triton", lambda: TritonSegments(device))
        self._table = torch.zeros(problem.slots, LINE, dtype=torch.int64, device=device)
        self._memory: dict[int, list[Tensor]] = {}
        steps = -(-problem.k // INPUTS)
        wanted = min(MAX_SPLIT, max(1, problem.k // MIN_INPUTS))
        self._steps = -(-steps // wanted)
        self.split = -(-steps // self._steps)

    def pack(self, parts: Sequence[LoraPart]) -> Sequence[LoraPart]:
        """See LoraProduct. The GPU lays them out."""
        return parts

    def load(self, slot: int, packed: Sequence[LoraPart]) -> int:
        """See LoraProduct."""
        self.unload(slot)
        if not packed:
            return 0
        parts = [part.to(self._device) for part in packed]
        assert len(parts) <= MAX_PARTS, "more layers side by side than the table has room for"
        a = self._kept(torch.cat([part.a for part in parts]), (0, -self._problem.k % 16))
        scales = self._kept(torch.cat([torch.full((len(part.a),), part.scale) for part in parts]))
        kept, first_rank = [a, scales], 0
        line = [a.data_ptr(), scales.data_ptr(), _KINDS[a.dtype], len(parts), len(a)]
        for part in parts:
            n, rank = part.b.shape
            assert part.a.dtype == part.b.dtype == a.dtype and part.a.shape == (rank, self._problem.k)
            assert 0 <= part.first <= part.first + n <= self._problem.n
            b = self._kept(part.b.T, (0, -n % 16))
            bias = None if part.bias is None else self._kept(part.bias.float() * part.scale)
            factors = None if part.factors is None else self._kept(part.factors.float())
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (b, bias, factors)]
            line += [part.first, n, first_rank, rank, *addresses]
            kept += [tensor for tensor in (b, bias, factors) if tensor is not None]
            first_rank += rank
        assert first_rank <= self._problem.max_rank, "an adapter's rank is checked before"
        self._memory[slot] = kept
        self._table[slot] = on_device(line + [0] * (LINE - len(line)), self._device, torch.int64)
        return sum(tensor.nbytes for tensor in kept)

    def unload(self, slot: int) -> None:
        """See LoraProduct."""
        if self._memory.pop(slot, None) is not None:
            self._table[slot] = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """x [M, K] and y [M, N]; see LoraProduct."""
        from aiakq.kernels.triton.lora_kernel import expand_kernel, shrink_kernel

        m, segments, problem = len(x), self._segments, self._problem
        count = m if self._rows.any_rows else segments.count
        if not count:
            return
        assert not self._rows.any_rows or m <= CAPACITY, "a graph has fewer rows"
        x = x if x.stride(1) == 1 else x.contiguous()
        inner = torch.empty(self.split, m, problem.max_rank, dtype=torch.float32, device=x.device)
        tables = self._table, segments.tiles, segments.rows
        shrink_kernel[(count, -(-problem.max_rank // RANKS), self.split)](
            x, *tables, inner, x.stride(0), inner.stride(1), inner.stride(0),
            K=problem.k, LINE=LINE, STEPS=self._steps, ROWS=ROWS, RANKS=RANKS, BLOCK=INPUTS, num_warps=4,
        )  # fmt: skip
        expand_kernel[(count, -(-problem.n // OUTPUTS))](
            inner, *tables, y, inner if self._bias is None else self._bias, inner.stride(1), inner.stride(0),
            y.stride(0), LINE=LINE, SPLIT=self.split, BASE_BIAS=self._bias is not None, ROWS=ROWS, RANKS=RANKS,
            BLOCK=OUTPUTS, num_warps=4,
        )  # fmt: skip

    def _kept(self, tensor: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
        """A copy in this layer's memory, whose columns end with zeros."""
        return F.pad(tensor, padding).contiguous().to(self._device)


def prepare(problem: LoraProblem, rows: AdapterRows, bias: Tensor | None) -> TritonLora:
    """bias [N] float32 of the base layer, or None."""
    return TritonLora(problem, rows, bias, torch.device(problem.device))
