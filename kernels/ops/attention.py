"""Paged attention: interface, torch reference and implementations.

The operation includes the head norms, the rotary embedding and the cache writes, because each implementation defines
the memory layout of its cache.

The reference processes keys in chunks of CHUNK positions, counted from position 0 of the sequence, with the running
maximum and sum of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). A token's result is bit-identical
whether it was computed in a whole prompt, in a chunk of one, or decoded in a batch with any other sequences, because
chunk boundaries depend on positions only and the rows of a matrix product are independent of each other (they are
padded to a multiple of ROWS, below which BLAS uses another summation order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.norm import IMPLEMENTATIONS as NORMS
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.rotary import apply_rotary, rotary_factors
from aiakq.kernels.selection import Implementations, select
from aiakq.kernels.types import (
    LARGEST,
    AttentionContext,
    AttentionProblem,
    AttentionSpec,
    LayerCache,
    NormProblem,
    RotaryTables,
)

CHUNK = 128
ROWS = 4


class PagedAttention(Protocol):
    """Causal attention of one layer over its paged KV cache."""

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Compute everything between the input and output projections of a layer.

        qkv        [T, sum of AttentionSpec.widths]: queries, keys and values concatenated, or queries alone if the
                   layer only reads; may be modified.
        positions  [T] int64, indices into the rotary tables.
        cache      receives this step's keys and values at ``context.slots``; slot 0 is padding and need not be written.
        returns    [T, H * value_dim] in the dtype of qkv.
        """

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Only store key [T, Hkv, D] and value [T, Hkv, value_dim] at ``slots`` [T] int64 of ``cache``. For layers
        without head norms that do not only read.
        """

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Only compute attention of query [T, H, D] over keys that are already cached -> [T, H, value_dim]."""


class AttentionKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, spec: AttentionSpec, problem: AttentionProblem) -> PagedAttention:
        """Bind the operation of one layer."""

    def new_cache(self, problem: AttentionProblem, pages: int, page_size: int, device: torch.device) -> LayerCache:
        """Allocate a zero-initialized cache in the layout that ``prepare`` expects."""


IMPLEMENTATIONS = Implementations[AttentionKernel].of_backends("attention", "cpu", "triton")


def prepare(spec: AttentionSpec, problem: AttentionProblem) -> TorchAttention:
    """Return the reference; it uses the best available implementation of the head norms."""
    return TorchAttention(spec, problem)


def new_cache(problem: AttentionProblem, pages: int, page_size: int, device: torch.device) -> LayerCache:
    """Allocate a zero-initialized cache of contiguous tensors."""
    shape, dtype = (pages, page_size, problem.num_kv_heads), problem.cache_dtype
    sizes = (problem.head_dim,) if problem.latent else (problem.head_dim, problem.value_dim)
    stored = [torch.zeros((*shape, size), dtype=dtype, device=device) for size in sizes]
    return (*stored, *(torch.zeros(shape, device=device) for _ in (sizes if dtype in LARGEST else ())))


def as_bytes(cache: Tensor) -> Tensor:
    """View 8-bit floats [...] as int8, because torch cannot index them; return tensors of wider dtypes unchanged."""
    return cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache


class TorchAttention:
    """The reference of PagedAttention."""

    def __init__(self, spec: AttentionSpec, problem: AttentionProblem) -> None:
        self.spec = spec
        self._q_norm, self._k_norm = (
            None if weight is None else self._head_norm(weight, problem) for weight in (spec.q_norm, spec.k_norm)
        )

    def _head_norm(self, weight: Tensor, problem: AttentionProblem) -> Norm:
        norm_problem = NormProblem("rms", len(weight), problem.dtype, problem.device)
        _, kernel = select(NORMS, norm_problem)
        return kernel.prepare(weight, None, self.spec.norm_eps, norm_problem)

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """See PagedAttention."""
        spec = self.spec
        queries, keys, values = qkv.split(spec.widths, dim=1)
        q = self._prepared(queries.unflatten(1, (spec.num_heads, -1)), self._q_norm, positions, context)
        if not spec.reads_only:
            k, v = (part.unflatten(1, (spec.num_kv_heads, -1)) for part in (keys, values))
            self.write(self._prepared(k, self._k_norm, positions, context), v, cache, context.slots)
        return self.attend(q, cache, context).flatten(1)

    def _prepared(self, x: Tensor, norm: Norm | None, positions: Tensor | None, context: AttentionContext) -> Tensor:
        """Return queries or keys [T, heads, D], normalized and rotated, in the order of the model."""
        if self.spec.rotated_norms:
            return _normalized(self._rotated(x, positions, context), norm)
        return self._rotated(_normalized(x, norm), positions, context)

    def _rotated(self, x: Tensor, positions: Tensor | None, context: AttentionContext) -> Tensor:
        """Return heads [T, heads, D], rotated if the layer has rotary embedding."""
        rotary = self.spec.rotary
        if rotary is None:
            return x
        assert positions is not None
        return apply_rotary(x, _factors(rotary, positions, x.dtype, context), rotary.interleaved)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, value_dim] at ``slots`` [T]; see PagedAttention."""
        page_size = cache[0].shape[1]
        position = (slots // page_size, slots % page_size)
        inputs = (key,) if self.spec.latent else (key, value)
        for x, stored, *scales in zip(inputs, *self._parts(cache), strict=True):
            if scales:
                scale = x.float().abs().amax(-1) / LARGEST[stored.dtype]
                scales[0][position] = scale
                x = x.float() / scale.clamp_min(1e-30).unsqueeze(-1)
                x = x.round() if stored.dtype == torch.int8 else x
            as_bytes(stored)[position] = as_bytes(x.to(stored.dtype))

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, value_dim]; see PagedAttention."""
        spec = self.spec
        layout = _Layout(spec.num_heads, cache[0].shape[1], spec.num_kv_heads, spec.sliding_window, spec.chunk_size)
        out = query.new_zeros(*query.shape[:2], spec.value_dim)
        if context.num_decodes:
            rows = slice(0, context.num_decodes)
            out[rows] = _decode(query[rows], cache, context, spec, layout)
        starts = context.query_start_list
        for s in range(context.num_decodes, len(starts) - 1):
            rows = slice(starts[s], starts[s + 1])
            out[rows] = _prefill(query[rows], cache, context, s, spec, layout)
        return out

    def _parts(self, cache: LayerCache) -> list[LayerCache]:
        """Return the cached tensors and, for 8-bit caches, their scales."""
        count = 1 if self.spec.latent else 2
        return [cache[:count], cache[count:]] if cache[count:] else [cache]


def _normalized(x: Tensor, norm: Norm | None) -> Tensor:
    """Return heads [T, heads, D], normalized if there is a norm."""
    if norm is None:
        return x
    normed = norm(x)
    assert isinstance(normed, Tensor)
    return normed


def _factors(
    tables: RotaryTables, positions: Tensor, dtype: torch.dtype, context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Return the rotary factors, computed once per step for all layers that share ``tables``."""
    factors: tuple[Tensor, Tensor] | None = context.plans.get(tables)
    if factors is None:
        factors = context.plans[tables] = rotary_factors(tables, positions, dtype)
    return factors


@dataclass(frozen=True)
class _Layout:
    """The properties of a layer that its plan depends on, besides the step."""

    heads: int
    page_size: int
    kv_heads: int
    window: int | None
    chunk_size: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass
class _Chunk:
    """One chunk of positions, shared by all layers of a step.

    pages     [S * C / P] pages of the cache.
    hidden    [S, 1, R, C] bool, True at positions that a query row must not attend to.
    unseen    [S, 1, C, 1] bool, True at positions that no query row attends to: their values may be stale data of other
              requests and need not be finite.
    distance  [S, 1, R, C] float32, distance of each position to the query row.
    """

    pages: Tensor
    hidden: Tensor
    unseen: Tensor
    distance: Tensor


def _planned(context: AttentionContext, key: tuple[object, ...], make: Callable[[], list[_Chunk]]) -> list[_Chunk]:
    """Return the plan ``key`` of this step, computed by the first layer that needs it."""
    plan = context.plans.get(key)
    if plan is None:
        plan = context.plans[key] = make()
    return plan


def _decode(
    query: Tensor, cache: LayerCache, context: AttentionContext, spec: AttentionSpec, layout: _Layout
) -> Tensor:
    """Attention of one query per sequence, all sequences at once: query [S, H, D] -> [S, H, value_dim]."""
    S, H, D = query.shape
    group = layout.group
    q = query.float().mul(spec.scale).view(S * layout.kv_heads, group, D)
    q = F.pad(q, (0, 0, 0, -group % ROWS))

    def make() -> list[_Chunk]:
        position = (context.kv_len[:S] - 1).view(S, 1, 1)
        ends = position + 1 if context.row_ends is None else context.row_ends[:S].view(S, 1, 1)
        return _chunks(context.page_table[:S], max(context.kv_len_list[:S]), position, ends, layout)

    rows = torch.arange(q.shape[1], device=q.device).clamp_max_(group - 1)
    out = _attend(q, cache, _planned(context, (layout, "decode"), make), spec, rows)
    return out[:, :group].reshape(S, H, -1).to(query.dtype)


def _prefill(
    query: Tensor, cache: LayerCache, context: AttentionContext, s: int, spec: AttentionSpec, layout: _Layout
) -> Tensor:
    """Attention of the last L positions of sequence s: query [L, H, D] -> [L, H, value_dim]."""
    L, H, D = query.shape
    group, kv_heads = layout.group, layout.kv_heads
    padded = L + -L % ROWS
    q = F.pad(query.float().mul(spec.scale), (0, 0, 0, 0, 0, padded - L))
    q = q.view(padded, kv_heads, group, D).transpose(0, 1).reshape(kv_heads, padded * group, D)

    def make() -> list[_Chunk]:
        kv_len = context.kv_len_list[s]
        first = kv_len - L
        # Padding rows attend to the same positions as the last real row.
        position = torch.arange(first, first + padded, device=query.device).clamp_max_(kv_len - 1)
        ends = position + 1
        if context.row_ends is not None:
            begin = context.query_start_list[s]
            ends = context.row_ends[begin + position - first]
        position, ends = (x.repeat_interleave(group).view(1, -1, 1) for x in (position, ends))
        return _chunks(context.page_table[s : s + 1], kv_len, position, ends, layout)

    rows = torch.arange(group, device=q.device).repeat(padded)
    out = _attend(q, cache, _planned(context, (layout, s), make), spec, rows)
    return out.view(kv_heads, padded, group, -1).transpose(0, 1).reshape(padded, H, -1)[:L].to(query.dtype)


def _chunks(page_table: Tensor, length: int, position: Tensor, ends: Tensor, layout: _Layout) -> list[_Chunk]:
    """Plan the chunks of sequences [S] over ``length`` positions; ``position`` and ``ends``, those of the positions
    that it attends to, [S, R or 1, 1] are per query row.
    """
    P = layout.page_size
    per_chunk = max(1, CHUNK // P)
    device = page_table.device
    count = -(-length // (P * per_chunk))
    missing = count * per_chunk - page_table.shape[1]
    table = F.pad(page_table, (0, missing)) if missing > 0 else page_table  # page 0 is scratch: hidden, always finite
    chunks = []
    for index in range(count):
        pages = table[:, index * per_chunk : (index + 1) * per_chunk].long().flatten()
        at = torch.arange(index * per_chunk * P, (index + 1) * per_chunk * P, device=device)
        hidden = at >= ends
        if layout.window is not None:
            hidden |= at <= position - layout.window
        if layout.chunk_size is not None:
            hidden |= at < position // layout.chunk_size * layout.chunk_size
        unseen, distance = hidden.all(dim=1).unsqueeze(1).unsqueeze(-1), (position - at).float()
        chunks.append(_Chunk(pages, hidden.unsqueeze(1), unseen, distance.unsqueeze(1)))
    return chunks


def _attend(q: Tensor, cache: LayerCache, chunks: list[_Chunk], spec: AttentionSpec, rows: Tensor) -> Tensor:
    """Online softmax over ``chunks``: q [S * Hkv, R, D] float32 -> [S * Hkv, R, value_dim].

    rows  [R] int64, index of each row's head within its group.
    """
    B, R, _ = q.shape
    kv_heads = spec.num_kv_heads
    maximum: Tensor | None = None
    total = weighted = torch.empty(())
    if spec.sinks is not None:
        # A sink acts as a first position with a score but no value.
        maximum = _of_rows(spec.sinks, kv_heads, rows).expand(B // kv_heads, kv_heads, R, 1).reshape(B, R, 1)
        total, weighted = torch.ones_like(maximum), q.new_zeros(B, R, spec.value_dim)
    for chunk in chunks:
        C = chunk.hidden.shape[-1]
        keys, values = _keys_and_values(cache, chunk.pages, C, spec)
        # Non-finite values would survive a softmax weight of 0.
        values.masked_fill_(chunk.unseen, 0)
        scores = torch.bmm(q, keys.view(B, C, -1).transpose(1, 2))
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        by_head = scores.view(-1, kv_heads, R, C)
        if spec.alibi is not None:
            by_head -= _of_rows(spec.alibi, kv_heads, rows) * chunk.distance
        by_head.masked_fill_(chunk.hidden, float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True)
        if maximum is not None:
            highest = torch.maximum(maximum, highest)
        # A row without any visible position so far keeps -inf; subtracting 0 instead avoids inf - inf.
        limited = spec.sliding_window is not None or spec.chunk_size is not None
        base = highest.masked_fill(highest == float("-inf"), 0.0) if limited else highest
        weights = scores.sub_(base).exp_()
        fresh, added = weights.sum(dim=-1, keepdim=True), torch.bmm(weights, values.view(B, C, -1))
        if maximum is None:
            total, weighted = fresh, added
        else:
            decay = torch.exp(maximum - base)
            total, weighted = total * decay + fresh, weighted * decay + added
        maximum = highest
    return weighted / total.clamp_min(torch.finfo(torch.float32).tiny)


def _of_rows(of_heads: Tensor, kv_heads: int, rows: Tensor) -> Tensor:
    """Expand per-head values [H] to [Hkv, R, 1] float32; ``rows`` [R] is each row's head index in its group."""
    return of_heads.float().view(kv_heads, -1)[:, rows].unsqueeze(-1)


def _keys_and_values(cache: LayerCache, pages: Tensor, C: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return keys [S, Hkv, C, D] and values [S, Hkv, C, value_dim] float32 of a chunk; values may be modified."""
    count = 1 if spec.latent else 2
    parts = [_read(part, pages, C) for part in cache[:count]]
    if cache[count:]:
        parts = [x * _read(s.unsqueeze(-1), pages, C) for x, s in zip(parts, cache[count:], strict=True)]
    keys = parts[0]
    return keys, keys[..., -spec.value_dim :].contiguous() if spec.latent else parts[1]


def _read(cache: Tensor, pages: Tensor, C: int) -> Tensor:
    """Gather pages [S * C / P] of a cache [pages, P, Hkv, ...] -> [S, Hkv, C, ...] float32."""
    gathered = as_bytes(cache).index_select(0, pages).view(cache.dtype)
    return gathered.unflatten(0, (-1, C // cache.shape[1])).flatten(1, 2).transpose(1, 2).float().contiguous()
