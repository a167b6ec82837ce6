"""Attention over the paged KV cache in the native library, with what comes before it in a layer: head norms, rotary
positions, and writing keys and values into the cache.

A NativeAttention is made once per layer and keeps its operations: a step only changes where they read and write.
"""

from __future__ import annotations

import threading
from ctypes import addressof

import torch
from torch import Tensor

from aiakq.kernels import cpu
from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.types import LARGEST, AttentionContext, AttentionProblem, AttentionSpec, LayerCache

CACHE_TYPES = {dtype: TYPES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)} | {torch.int8: 4}
#: As in src/ops.def.
MAX_HEAD_SIZE = 1024
SEGMENT = 1024
TILE_ROWS = 96


def supports(problem: AttentionProblem) -> str | None:
    """None, or why not."""
    reason = cpu.unsupported(problem.device, problem.dtype)
    if reason is None and problem.cache_dtype not in CACHE_TYPES:
        reason = f"it has no cache in {problem.cache_dtype}"
    if reason is None and problem.head_dim > MAX_HEAD_SIZE:
        reason = f"heads have at most {MAX_HEAD_SIZE} elements"
    return reason


def prepare(spec: AttentionSpec, problem: AttentionProblem) -> NativeAttention:
    """One layer's operations."""
    return NativeAttention(spec)


def new_cache(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """A cache, all zeros, in which a head of a page is contiguous in memory: keys [D, P], so that neighbours in memory
    are keys of neighbouring positions; values [P, D]; scales [P]."""
    keys = library.empty_on_large_pages(pages, kv_heads, head_dim, page_size, dtype=dtype).zero_()
    values = library.empty_on_large_pages(pages, kv_heads, page_size, head_dim, dtype=dtype).zero_()
    scales = (torch.zeros(pages, kv_heads, page_size).transpose(1, 2) for _ in range(2 if dtype in LARGEST else 0))
    return (keys.permute(0, 3, 1, 2), values.transpose(1, 2), *scales)


class NativeAttention:
    """The attention of one layer; the interface is PagedAttention in ops/attention.py."""

    def __init__(self, spec: AttentionSpec) -> None:
        heads, kv_heads, head_size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        before, after = new_op("rotary"), new_op("attention")
        for op in (before, after):
            op.heads, op.kv_heads, op.head_size = heads, kv_heads, head_size
        self._positions = 0
        # What the operations point to.
        self._kept = [None if norm is None else norm.float().contiguous() for norm in (spec.q_norm, spec.k_norm)]
        before.q_norm, before.k_norm = (address(norm) for norm in self._kept)
        before.eps = spec.norm_eps
        if spec.rotary is not None:
            tables = [table.float().contiguous() for table in (spec.rotary.cosines, spec.rotary.sines)]
            self._kept += tables
            before.cosines, before.sines = (address(table) for table in tables)
            before.rotated = spec.rotary.rotated
            self._positions = len(tables[0])
        after.scale, after.window = spec.scale, spec.sliding_window or 0
        self._before, self._after = before, after
        self._width = heads * head_size
        self._kv_width = kv_heads * head_size
        self._per_thread = load_library().scratch_bytes(after)
        rows = max(1, TILE_ROWS // (heads // kv_heads)) * (heads // kv_heads)
        self._part = 4 * (2 * -(-rows // 16) * 16 + rows * -(-head_size // 16) * 16)
        self._write, self._both, self._attend = OpList(before), OpList(before, after), OpList(after)
        self._cache: LayerCache = ()
        self._dtype: torch.dtype | None = None

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """See PagedAttention. Modifies qkv."""
        at, stride, size = qkv.data_ptr(), qkv.stride(0), qkv.element_size()
        assert qkv.stride(1) == 1
        before = self._before
        before.k = at + self._width * size
        before.v = before.k + self._kv_width * size
        before.k_stride = before.v_stride = stride
        self._bind(qkv, cache)
        tables = _tables(context)
        if positions is not None and self._positions:
            tables.turn(positions, self._positions)
        before.m, before.step = qkv.shape[0], tables.address
        before.q, before.q_stride = at, stride
        return self._attention(qkv, at, stride, tables, self._both)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value [T, Hkv, D] at ``slots`` [T]; see PagedAttention."""
        k, v = key.flatten(1), value.flatten(1)
        assert k.stride(1) == v.stride(1) == 1 and slots.is_contiguous()
        step, before = load_library().structs["Step"](), self._before
        step.slots = slots.data_ptr()
        self._bind(k, cache)
        before.m, before.step, before.q = k.shape[0], addressof(step), None
        before.k, before.k_stride = k.data_ptr(), k.stride(0)
        before.v, before.v_stride = v.data_ptr(), v.stride(0)
        self._write()

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, D]; see PagedAttention."""
        q = query.flatten(1)
        assert q.stride(1) == 1
        self._bind(q, cache)
        return self._attention(q, q.data_ptr(), q.stride(0), _tables(context), self._attend).view(query.shape)

    def _attention(self, q: Tensor, at: int, stride: int, tables: StepTables, ops: OpList) -> Tensor:
        after = self._after
        out = torch.empty((q.shape[0], self._width), dtype=q.dtype)
        after.m, after.step = q.shape[0], tables.address
        after.q, after.q_stride = at, stride
        after.out, after.out_stride = out.data_ptr(), self._width
        after.scratch, after.scratch_bytes = tables.scratch(self._per_thread, self._part)
        ops()
        return out

    def _bind(self, x: Tensor, cache: LayerCache) -> None:
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
    """Where a step's tokens are, as the library reads it: the same for all layers, whose operations point here.

    ``longest`` is the most positions a sequence may have. Recorded operations are used for many steps: each of them
    ``fill``s the same tables again, which with ``keep_memory`` keep the scratch memory of the threads too.
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
        """Positions [T] int64, for layers with rotary tables of ``limit`` rows; no effect if no layer has any."""
        if limit is not None:
            self._turned, self._limit = True, min(limit, self._limit)
            assert self.longest <= self._limit
        if self._turned and positions is not self._positions:
            assert positions.dtype == torch.int64
            self._positions = positions.contiguous()
            self.struct.positions = self._positions.data_ptr()

    def scratch(self, per_thread: int, part: int) -> tuple[int, int]:
        """Address and bytes of the scratch memory: ``per_thread`` bytes for each, and parts of shared segments."""
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
