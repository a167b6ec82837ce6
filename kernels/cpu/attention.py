"""CPU paged attention, with the head norms, rotary embedding and KV cache writes before it.

A NativeAttention is created once per layer and reuses its operations: a step only updates their pointers.
"""

from __future__ import annotations

import itertools
import threading
from ctypes import addressof

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.cpu.memory import zeros_on_large_pages
from aiakq.kernels.recurrent_types import StateContext
from aiakq.kernels.types import LARGEST, AttentionContext, AttentionProblem, AttentionSpec, LayerCache

CACHE_TYPES = {dtype: TYPES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)} | {torch.int8: 4}
#: The same value as in src/ops.def.
MAX_HEAD_SIZE = 1024
SEGMENT = 1024
TILE_ROWS = 96


def supports(problem: AttentionProblem) -> str | None:
    """Return None, or why not."""
    if problem.cache_dtype not in CACHE_TYPES:
        return f"it has no cache in {problem.cache_dtype}"
    too_large = max(problem.head_dim, problem.value_dim) > MAX_HEAD_SIZE
    return f"heads have at most {MAX_HEAD_SIZE} elements" if too_large else None


def prepare(spec: AttentionSpec, problem: AttentionProblem) -> NativeAttention:
    """Prepare the operations of one layer."""
    return NativeAttention(spec)


def new_cache(problem: AttentionProblem, pages: int, page_size: int, device: torch.device) -> LayerCache:
    """Allocate a zero-initialized cache in which each head of a page is contiguous: keys [D, P], so that keys of
    consecutive positions are adjacent in memory; values [P, value_dim]; latents [P, D]; scales [P]."""
    dtype, heads = problem.cache_dtype, problem.num_kv_heads

    def tensor(*shape: int) -> Tensor:
        return zeros_on_large_pages(pages, heads, *shape, dtype=dtype)

    if problem.latent:
        stored = [tensor(page_size, problem.head_dim).transpose(1, 2)]
    else:
        keys, values = tensor(problem.head_dim, page_size), tensor(page_size, problem.value_dim)
        stored = [keys.permute(0, 3, 1, 2), values.transpose(1, 2)]
    scales = (torch.zeros(pages, heads, page_size).transpose(1, 2) for _ in (stored if dtype in LARGEST else ()))
    return (*stored, *scales)


class NativeAttention:
    """The attention of one layer; the interface is PagedAttention in ops/attention.py."""

    def __init__(self, spec: AttentionSpec) -> None:
        heads, kv_heads, head_size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        before, after = new_op("rotary"), new_op("attention")
        for op in (before, after):
            op.heads, op.kv_heads, op.head_size, op.value_size = heads, kv_heads, head_size, spec.value_dim
        before.kv_heads = 0 if spec.reads_only else kv_heads  # of which keys and values are written
        self._positions = 0
        # Keeps the tensors alive that the operations point to.
        self._kept = [None if norm is None else norm.float().contiguous() for norm in (spec.q_norm, spec.k_norm)]
        before.q_norm, before.k_norm = (address(norm) for norm in self._kept)
        before.eps, before.rotated_norms = spec.norm_eps, spec.rotated_norms
        if spec.rotary is not None:
            tables = [table.float().contiguous() for table in (spec.rotary.cosines, spec.rotary.sines)]
            self._kept += tables
            before.cosines, before.sines = (address(table) for table in tables)
            before.rotated, before.interleaved = spec.rotary.rotated, spec.rotary.interleaved
            self._positions = len(tables[0])
        of_heads = [None if x is None else x.float().contiguous() for x in (spec.sinks, spec.alibi)]
        self._kept += of_heads
        after.sinks, after.alibi = (address(x) for x in of_heads)
        after.scale, after.softcap = spec.scale, spec.softcap
        after.window, after.chunk_size = spec.sliding_window or 0, spec.chunk_size or 0
        self._before, self._after = before, after
        self.spec = spec
        self._width, self._key_width, self._value_width = spec.widths
        self._out_width = heads * spec.value_dim
        self._per_thread = load_library().scratch_bytes(after)
        rows = max(1, TILE_ROWS // (heads // kv_heads)) * (heads // kv_heads)
        self._part = 4 * (2 * -(-rows // 16) * 16 + rows * -(-spec.value_dim // 16) * 16)
        self._write, self._both, self._attend = OpList(before), OpList(before, after), OpList(after)
        self._shapes = [(kv_heads, head_size)] if spec.latent else [(kv_heads, head_size), (kv_heads, spec.value_dim)]
        self._cache: LayerCache = ()
        self._dtype: torch.dtype | None = None
        # Held while the fields of both operations are set and used by one call.
        self._lock = threading.Lock()

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """See PagedAttention. Modifies qkv."""
        at, stride, size = qkv.data_ptr(), qkv.stride(0), qkv.element_size()
        check_rows(qkv, self._width + self._key_width + self._value_width)
        before = self._before
        tables = step_tables(context)
        if positions is not None and self._positions:
            tables.set_positions(positions, self._positions)
        tables.check(qkv.shape[0], writes=True)
        with self._lock:
            before.k = at + self._width * size
            before.v = before.k + self._key_width * size
            before.k_stride = before.v_stride = stride
            self._bind(qkv, cache)
            before.m, before.step = qkv.shape[0], tables.address
            before.q, before.q_stride = at, stride
            return self._attention(qkv, at, stride, tables, self._both)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, value_dim] at ``slots`` [T]; see PagedAttention."""
        k = key.flatten(1)
        v = k if self.spec.latent else value.flatten(1)
        check_rows(k, self._key_width)
        check_rows(v, self._value_width or self._key_width)
        if len(k) != len(v) or len(k) != len(slots) or not slots.is_contiguous() or k.dtype != v.dtype:
            raise ValueError(f"{len(k)} keys in {k.dtype}, {len(v)} values in {v.dtype} and {len(slots)} slots")
        step, before = load_library().structs["Step"](), self._before
        step.slots = slots.data_ptr()
        with self._lock:
            self._bind(k, cache)
            before.m, before.step, before.q = k.shape[0], addressof(step), None
            before.k, before.k_stride = k.data_ptr(), k.stride(0)
            before.v, before.v_stride = v.data_ptr(), v.stride(0)
            self._write()

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, value_dim]; see PagedAttention."""
        q = query.flatten(1)
        check_rows(q, self._width)
        tables = step_tables(context)
        tables.check(len(q), writes=False)
        with self._lock:
            self._bind(q, cache)
            out = self._attention(q, q.data_ptr(), q.stride(0), tables, self._attend)
            return out.view(*query.shape[:-1], -1) if query.dim() == 3 else out

    def _attention(self, q: Tensor, at: int, stride: int, tables: StepTables, ops: OpList) -> Tensor:
        after = self._after
        out = torch.empty((q.shape[0], self._out_width), dtype=q.dtype)
        after.m, after.step = q.shape[0], tables.address
        after.q, after.q_stride = at, stride
        after.out, after.out_stride = out.data_ptr(), self._out_width
        after.scratch, after.scratch_bytes = tables.scratch(self._per_thread, self._part)
        ops()
        return out

    def _bind(self, x: Tensor, cache: LayerCache) -> None:
        """Point the operations to ``cache`` if it differs from the last one."""
        if cache is self._cache and x.dtype is self._dtype:
            return
        stored, scales = cache[: len(self._shapes)], cache[len(self._shapes) :]
        shapes, keys = [tuple(tensor.shape[2:]) for tensor in stored], stored[0]
        if shapes != self._shapes or any(tensor.shape[:2] != keys.shape[:2] for tensor in stored):
            raise ValueError(f"a layer with heads {self._shapes} over a cache of {shapes}")
        assert len(stored) == 1 or keys.permute(0, 2, 3, 1).is_contiguous(), "see new_cache"
        by_token = (*stored[-1:], *scales)
        assert all(tensor.transpose(1, 2).is_contiguous() for tensor in by_token), "see new_cache"
        assert len(scales) == (len(stored) if keys.dtype == torch.int8 else 0), "int8 caches have scales"
        self._cache, self._dtype = cache, x.dtype
        for op in (self._before, self._after):
            op.k_cache, op.v_cache = keys.data_ptr(), stored[1].data_ptr() if len(stored) > 1 else None
            op.k_scales = scales[0].data_ptr() if scales else None
            op.v_scales = scales[1].data_ptr() if len(scales) > 1 else None
            op.cache_type, op.page_size = CACHE_TYPES[keys.dtype], keys.shape[1]
        self._before.x_type = self._after.q_type = self._after.out_type = TYPES[x.dtype]


def check_rows(x: Tensor, width: int) -> None:
    """Raise ValueError unless x is [T, width] with contiguous rows; the library reads ``width`` elements of each."""
    if x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
        raise ValueError(f"rows of {width} elements are expected, not {list(x.shape)} with strides {list(x.stride())}")


class StepTables:
    """The tables of a step in the form that the library reads; all layers share them and their operations point here.

    ``longest`` is the maximum length of a sequence. Recorded operations serve many steps: each step ``fill``s the same
    tables again. With ``keep_memory`` they also keep the scratch memory of the threads.
    """

    def __init__(self, longest: int, keep_memory: bool = False) -> None:
        self.longest = longest
        self.struct = load_library().structs["Step"]()
        self.address = addressof(self.struct)
        self._keep_memory = keep_memory
        self._has_rotary = False
        self._limit = longest
        self._tensors: tuple[Tensor, ...] = ()
        self._states: tuple[Tensor, ...] = ()
        self._positions: Tensor | None = None
        self._row_ends: Tensor | None = None
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
        self._row_ends = None if context.row_ends is None else context.row_ends.to(torch.int32).contiguous()
        step.row_ends = None if self._row_ends is None else self._row_ends.data_ptr()
        states = context.states
        if isinstance(states, StateContext):
            sources = torch.tensor(states.sources, dtype=torch.int64)
            saves = torch.tensor([pair for pairs in states.saves for pair in pairs], dtype=torch.int64)
            starts = torch.tensor([0, *itertools.accumulate(map(len, states.saves))], dtype=torch.int32)
            self._states = (sources, saves, starts)
            step.state_sources, step.state_saves, step.save_start = (x.data_ptr() for x in self._states)

    def check_states(self, states: Tensor, shape: tuple[int, ...], tokens: int) -> None:
        """Raise ValueError unless ``states`` are [rows, *shape] float32 and the tables belong to a step of ``tokens``
        tokens that specifies state rows. Does nothing while recording, when there are no tables yet.
        """
        if states.shape[1:] != shape or states.dtype != torch.float32 or not states.is_contiguous():
            raise ValueError(
                f"states {list(states.shape)} in {states.dtype} where {list(shape)} in float32 are expected"
            )
        if not self._tensors:
            return
        starts = self._tensors[0]
        if not self._states or len(self._states[0]) != len(starts) - 1 or int(starts[-1]) > tokens:
            raise ValueError(f"{tokens} tokens of {len(starts) - 1} sequences, whose states have no place")

    def check(self, tokens: int, writes: bool) -> None:
        """Raise ValueError unless the tables belong to ``tokens`` tokens. Does nothing while recording.

        writes  whether each token needs a slot.
        """
        query_start, kv_len, table, slots = self._tensors or (None,) * 4
        if slots is None or query_start is None or kv_len is None or table is None:
            return
        if self._row_ends is not None and len(self._row_ends) < int(query_start[-1]):
            raise ValueError(f"{len(self._row_ends)} ends of positions for {int(query_start[-1])} tokens")
        if (writes and len(slots) != tokens) or len(query_start) != len(kv_len) + 1 or len(table) != len(kv_len):
            raise ValueError(
                f"{tokens} tokens, {len(slots)} slots, {len(kv_len)} lengths, {len(query_start)} starts and "
                f"{len(table)} page tables do not belong together"
            )

    def set_positions(self, positions: Tensor, limit: int | None = None) -> None:
        """Set positions [T] int64 for layers with rotary tables of ``limit`` rows; no effect if no layer has any."""
        if limit is not None:
            self._has_rotary, self._limit = True, min(limit, self._limit)
            assert self.longest <= self._limit
        if self._has_rotary and positions is not self._positions:
            assert positions.dtype == torch.int64
            self._positions = positions.contiguous()
            self.struct.positions = self._positions.data_ptr()

    def scratch(self, per_thread: int, part: int) -> tuple[int, int]:
        """Return address and size of scratch memory: ``per_thread`` bytes each, plus partials of shared segments."""
        threads = torch.get_num_threads()
        scratch_memory = self._scratch.get((per_thread, part, threads))
        if scratch_memory is None:
            count = per_thread * threads
            if self.longest > SEGMENT and threads > 1:
                count += 4 * threads * (self.longest // SEGMENT + 2) * part
            memory = library.allocate_scratch(count) if self._keep_memory else _memory(count)
            scratch_memory = self._scratch[per_thread, part, threads] = memory, count
        return scratch_memory[0].data_ptr(), scratch_memory[1]


def step_tables(context: AttentionContext) -> StepTables:
    """Return the tables of a step, created by the first layer that needs them."""
    tables = context.plans.get("native")
    if tables is None:
        tables = context.plans["native"] = StepTables(max(context.kv_len_list, default=0))
        tables.fill(context)
    return tables


_own = threading.local()


def _memory(count: int) -> Tensor:
    """Return at least ``count`` bytes, reused between calls from the same Python thread."""
    memory = getattr(_own, "memory", None)
    if memory is None or memory.numel() < count:
        memory = _own.memory = library.allocate_scratch(count)
    return memory
