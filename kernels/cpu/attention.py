"""Attention over the paged cache on the CPU through the native library, with what comes before it in a layer: head
norms, rotary positions, keys and values into the cache.

A PagedAttention is made once per layer and keeps its operations: a step only changes where they read and write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.types import AttentionContext

CACHE_TYPES = {dtype: TYPES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)} | {torch.int8: 4}
#: As in src/ops.def.
MOST_HEAD_SIZE = 1024
SEGMENT = 1024
TILE_ROWS = 96

#: Keys and values [pages, P, Hkv, D]; int8 ones are followed by their scales [pages, P, Hkv] float32. As ``new_cache``
#: lays them out.
Cache = Sequence[Tensor]


def supports(dtype: torch.dtype, cache: torch.dtype, head_size: int, device: str) -> str | None:
    """None if attention over such activations and caches runs here, or why not."""
    if device != "cpu":
        return "it runs on CPUs"
    if dtype not in CACHE_TYPES or dtype == torch.int8:
        return f"no activations in {dtype}"
    if cache not in CACHE_TYPES:
        return f"no cache in {cache}"
    if head_size > MOST_HEAD_SIZE:
        return f"heads have at most {MOST_HEAD_SIZE} elements"
    return library.unavailable()


def new_cache(pages: int, page_size: int, kv_heads: int, size: int, dtype: torch.dtype, scaled: bool) -> Cache:
    """A cache, all zeros, in whose memory a head of a page is in one piece: keys [D, P], so that neighbours in memory
    are keys of neighbouring positions; values [P, D]; scales [P]."""
    keys = library.empty_on_large_pages(pages, kv_heads, size, page_size, dtype=dtype).zero_()
    values = library.empty_on_large_pages(pages, kv_heads, page_size, size, dtype=dtype).zero_()
    scales = (torch.zeros(pages, kv_heads, page_size).transpose(1, 2) for _ in range(2 if scaled else 0))
    return (keys.permute(0, 3, 1, 2), values.transpose(1, 2), *scales)


@dataclass
class Turning:
    """How queries and keys are turned: cosines and sines [positions, rotated / 2] float32, of the first elements."""

    cosines: Tensor
    sines: Tensor


class PagedAttention:
    """The attention of one layer.

    turning         rotary positions, or None for none.
    q_norm, k_norm  weights [D] of RMS norms of every head, or None.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        turning: Turning | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        before, after = new_op("rotary"), new_op("attention")
        for op in (before, after):
            op.heads, op.kv_heads, op.head_size = heads, kv_heads, head_size
        self._positions = 0
        self._kept = [None if norm is None else norm.float().contiguous() for norm in (q_norm, k_norm)]
        before.q_norm, before.k_norm = (address(norm) for norm in self._kept)
        before.eps = eps
        if turning is not None:
            tables = [table.float().contiguous() for table in (turning.cosines, turning.sines)]
            self._kept += tables
            before.cosines, before.sines = (address(table) for table in tables)
            before.rotated = 2 * tables[0].shape[1]
            self._positions = len(tables[0])
        after.scale, after.window = scale, window or 0
        self._before, self._after = before, after
        self._width = heads * head_size
        self._kv_width = kv_heads * head_size
        self._per_thread = load_library().scratch_bytes(after)
        rows = max(1, TILE_ROWS // (heads // kv_heads)) * (heads // kv_heads)
        self._part = 4 * (2 * -(-rows // 16) * 16 + rows * -(-head_size // 16) * 16)
        self._write, self._both, self._attend = OpList(before), OpList(before, after), OpList(after)
        self._cache: Cache = ()
        self._dtype: torch.dtype | None = None

    def fused(self, qkv: Tensor, positions: Tensor | None, cache: Cache, context: AttentionContext) -> Tensor:
        """qkv [T, (H + 2 Hkv) D], modified -> [T, H * D]; writes keys and values into ``cache``."""
        at, stride, size = qkv.data_ptr(), qkv.stride(0), qkv.element_size()
        assert qkv.stride(1) == 1
        before = self._before
        before.k = at + self._width * size
        before.v = before.k + self._kv_width * size
        before.k_stride = before.v_stride = stride
        return self._run(qkv, at, stride, positions, cache, context)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cache: Cache, context: AttentionContext
    ) -> Tensor:
        """q [T, H * D], modified, and k, v [T, Hkv * D] -> [T, H * D]; writes keys and values into ``cache``."""
        assert q.stride(1) == k.stride(1) == v.stride(1) == 1
        before = self._before
        before.k, before.k_stride = k.data_ptr(), k.stride(0)
        before.v, before.v_stride = v.data_ptr(), v.stride(0)
        return self._run(q, q.data_ptr(), q.stride(0), positions, cache, context)

    def write(self, k: Tensor, v: Tensor, cache: Cache, slots: Tensor) -> None:
        """Only write k, v [T, Hkv * D] into ``cache`` at ``slots`` [T] int64, but for slot 0."""
        assert k.stride(1) == v.stride(1) == 1 and slots.is_contiguous()
        step, before = load_library().structs["Step"](), self._before
        step.slots = slots.data_ptr()
        self._bind(k, cache)
        before.m, before.step, before.q = k.shape[0], addressof(step), None
        before.k, before.k_stride = k.data_ptr(), k.stride(0)
        before.v, before.v_stride = v.data_ptr(), v.stride(0)
        self._write()

    def attend(self, q: Tensor, cache: Cache, context: AttentionContext) -> Tensor:
        """Only attention: q [T, H * D] -> [T, H * D]."""
        assert q.stride(1) == 1
        self._bind(q, cache)
        return self._attention(q, q.data_ptr(), q.stride(0), _tables(context), self._attend)

    def _run(
        self, q: Tensor, at: int, stride: int, positions: Tensor | None, cache: Cache, context: AttentionContext
    ) -> Tensor:
        self._bind(q, cache)
        tables = _tables(context)
        if positions is not None and self._positions:
            tables.turn(positions, self._positions)
        before = self._before
        before.m, before.step = q.shape[0], tables.address
        before.q, before.q_stride = at, stride
        return self._attention(q, at, stride, tables, self._both)

    def _attention(self, q: Tensor, at: int, stride: int, tables: StepTables, ops: OpList) -> Tensor:
        after = self._after
        out = torch.empty((q.shape[0], self._width), dtype=q.dtype)
        after.m, after.step = q.shape[0], tables.address
        after.q, after.q_stride = at, stride
        after.out, after.out_stride = out.data_ptr(), self._width
        after.scratch, after.scratch_bytes = tables.scratch(self._per_thread, self._part)
        ops()
        return out

    def _bind(self, x: Tensor, cache: Cache) -> None:
        """Point to ``cache``, if it is another one than last time."""
        if cache is self._cache and x.dtype is self._dtype:
            return
        keys, values, *scales = cache
        assert keys.permute(0, 2, 3, 1).is_contiguous() and values.transpose(1, 2).is_contiguous(), "see new_cache"
        assert all(scale.transpose(1, 2).is_contiguous() for scale in scales), "see new_cache"
        assert (len(scales) == 2) == (keys.dtype == torch.int8), "int8 caches have scales"
        self._cache, self._dtype = cache, x.dtype
        for op in (self._before, self._after):
            op.k_cache, op.v_cache = keys.data_ptr(), values.data_ptr()
            op.k_scales, op.v_scales = (scale.data_ptr() for scale in scales) if scales else (None, None)
            op.cache_type, op.page_size = CACHE_TYPES[keys.dtype], keys.shape[1]
        self._before.x_type = self._after.q_type = self._after.out_type = TYPES[x.dtype]


class StepTables:
    """Where a step's tokens are, as the library wants it: the same for all layers, which point here.

    ``longest`` is the most positions a sequence may have. What was recorded outlives its step: the step after it
    ``fill``s the same tables again, and they keep the memory that threads need if ``keep_memory`` says so.
    """

    def __init__(self, longest: int, keep_memory: bool = False) -> None:
        self.longest = longest
        self.struct = load_library().structs["Step"]()
        self.address = addressof(self.struct)
        self._keep_memory = keep_memory
        self._turned = False
        self._limit = longest
        self._tensors: tuple[Tensor, ...] = ()
        self._positions: Tensor | None = None
        self._scratch: dict[tuple[int, int, int], tuple[Tensor, int]] = {}

    def fill(self, context: AttentionContext) -> None:
        """Point to the tables of ``context``."""
        as_int32 = (context.query_start, context.kv_len, context.page_table)
        query_start, kv_len, table = (x.to(torch.int32).contiguous() for x in as_int32)
        slots = context.slots.contiguous()
        self._tensors = (query_start, kv_len, table, slots)
        step = self.struct
        step.sequences, step.max_pages = table.shape
        step.query_start, step.kv_len, step.page_table = (x.data_ptr() for x in (query_start, kv_len, table))
        step.slots = slots.data_ptr()

    def turn(self, positions: Tensor, limit: int | None = None) -> None:
        """Positions [T] int64 for layers that rotate, whose tables have ``limit`` rows; only where any layer does."""
        if limit is not None:
            self._turned, self._limit = True, min(limit, self._limit)
            assert self.longest <= self._limit
        if self._turned and positions is not self._positions:
            assert positions.dtype == torch.int64
            self._positions = positions.contiguous()
            self.struct.positions = self._positions.data_ptr()

    def scratch(self, per_thread: int, part: int) -> tuple[int, int]:
        """Where the memory is and how much: ``per_thread`` bytes for each, and for parts if segments are shared out."""
        threads = torch.get_num_threads()
        found = self._scratch.get((per_thread, part, threads))
        if found is None:
            count = per_thread * threads
            if self.longest > SEGMENT and threads > 1:
                count += 4 * threads * (self.longest // SEGMENT + 2) * part
            memory = library.allocate_scratch(count) if self._keep_memory else _memory(count)
            found = self._scratch[per_thread, part, threads] = memory, count
        return found[0].data_ptr(), found[1]


def _tables(context: AttentionContext) -> StepTables:
    tables = context.plans.get("native")
    if tables is None:
        tables = context.plans["native"] = StepTables(max(context.kv_len_list, default=0))
        tables.fill(context)
    return tables


_own = threading.local()


def _memory(count: int) -> Tensor:
    """At least ``count`` bytes, the same again and again for a thread of Python's."""
    memory = getattr(_own, "memory", None)
    if memory is None or memory.numel() < count:
        memory = _own.memory = library.allocate_scratch(count)
    return memory
