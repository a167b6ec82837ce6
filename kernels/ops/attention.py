"""Attention over the paged KV cache: native or Triton's where those run, else here in plain torch, the oracle of both.

Keys are walked in chunks of CHUNK positions, counted from position 0 of the sequence, with the running maximum and sum
of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Because chunk borders depend on positions alone,
and rows of a product do not depend on each other (rows are padded to a multiple of ROWS, below which BLAS switches to
another summation order), a token's result is the same bit for bit whether it came in a whole prompt, in a chunk of
one, or decoded next to any other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import triton
from aiakq.kernels.cpu import attention as native
from aiakq.kernels.triton import attention as paged
from aiakq.kernels.types import LARGEST, AttentionContext

CHUNK = 128
ROWS = 4

#: Keys and values [pages, P, Hkv, D]; those of 8 bits are followed by the scales of both [pages, P, Hkv] float32.
Cache = Sequence[Tensor]


def new_cache(pages: int, page_size: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """The cache of one layer, all zeros; in memory as the kernels of ``device`` want it."""
    if device.type == "cpu":
        return native.new_cache(pages, page_size, kv_heads, size, dtype, dtype in LARGEST)
    shape = (pages, page_size, kv_heads)
    stored = [torch.zeros((*shape, size), dtype=dtype, device=device) for _ in range(2)]
    return (*stored, *(torch.zeros(shape, device=device) for _ in range(2 if dtype in LARGEST else 0)))


def as_bytes(cache: Tensor) -> Tensor:
    """A tensor of 8-bit floats as int8: torch picks and copies no rows of them."""
    return cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache


_wanted: str | None = None


def use(implementation: str | None) -> None:
    """Compute attention by ``native`` or ``torch`` from now on; None for native where it runs. For tests."""
    global _wanted
    _wanted = implementation


def is_native(x: Tensor, cache: Tensor) -> bool:
    """Whether attention of activations like ``x`` over a cache like ``cache`` [..., D] is native."""
    if _wanted == "torch" or x.device.type != "cpu":
        return False
    reason = _why_not(x.dtype, cache.dtype, cache.shape[-1])
    assert _wanted is None or reason is None, reason
    return reason is None


@lru_cache
def _why_not(dtype: torch.dtype, cache: torch.dtype, head_size: int) -> str | None:
    return native.supports(dtype, cache, head_size, "cpu")


def write_kv(key: Tensor, value: Tensor, cache: Cache, slots: Tensor) -> None:
    """Store key and value [T, Hkv, D] at ``slots`` [T] of ``cache``, which is modified; slot 0 may be left as it is."""
    if is_native(key, cache[0]):
        layer = native.PagedAttention(key.shape[1], key.shape[1], key.shape[2], 1.0)
        layer.write(key.flatten(1), value.flatten(1), cache, slots)
        return
    page_size = cache[0].shape[1]
    place = (slots // page_size, slots % page_size)
    for x, stored, *scales in zip((key, value), cache[:2], *([cache[2:]] if cache[2:] else []), strict=True):
        if scales:
            scale = x.float().abs().amax(-1) / LARGEST[stored.dtype]
            scales[0][place] = scale
            x = x.float() / scale.clamp_min(1e-30).unsqueeze(-1)
            x = x.round() if stored.dtype == torch.int8 else x
        as_bytes(stored)[place] = as_bytes(x.to(stored.dtype))


def paged_attention(
    query: Tensor,
    cache: Cache,
    context: AttentionContext,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of query [T, H, D] over the cache; returns [T, H, D] in the query's dtype.

    The step's own keys must be in the cache already (``write_kv``). sliding_window W lets a query see itself and the
    W - 1 positions before it.
    """
    k_cache = cache[0]
    if is_native(query, k_cache):
        T, H, D = query.shape
        layer = native.PagedAttention(H, k_cache.shape[2], D, scale, sliding_window)
        return layer.attend(query.flatten(1), cache, context).view(T, H, D)
    if triton.usable(query):
        return paged.attend(query, cache, context, scale, sliding_window)
    layout = _Layout(query.shape[1], k_cache.shape[1], k_cache.shape[2], sliding_window)
    out = torch.zeros_like(query)
    if context.num_decodes:
        rows = slice(0, context.num_decodes)
        out[rows] = _decode(query[rows], cache, context, scale, layout)
    starts = context.query_start_list
    for s in range(context.num_decodes, len(starts) - 1):
        rows = slice(starts[s], starts[s + 1])
        out[rows] = _prefill(query[rows], cache, context, s, scale, layout)
    return out


@dataclass(frozen=True)
class _Layout:
    """What a layer's plan depends on besides the step: heads, page size, key-value heads, window."""

    heads: int
    page_size: int
    kv_heads: int
    window: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass
class _Chunk:
    """One chunk of positions, the same for all layers of a step.

    pages   [S * C / P] pages of the cache.
    hidden  [S, 1, R, C] bool, True where a query row may not look.
    unseen  [S, 1, C, 1] bool, True where none does: what is there was left by others and need not be finite.
    """

    pages: Tensor
    hidden: Tensor
    unseen: Tensor


def _planned(context: AttentionContext, key: tuple, make: Callable[[], list[_Chunk]]) -> list[_Chunk]:
    """A plan of this step, made by the first layer that needs it."""
    plan = context.plans.get(key)
    if plan is None:
        plan = context.plans[key] = make()
    return plan


def _decode(query: Tensor, cache: Cache, context: AttentionContext, scale: float, layout: _Layout) -> Tensor:
    """One query per sequence, all sequences at once: query [S, H, D] -> [S, H, D]."""
    S, H, D = query.shape
    group = layout.group
    q = query.float().mul(scale).view(S * layout.kv_heads, group, D)
    q = F.pad(q, (0, 0, 0, -group % ROWS))

    def make() -> list[_Chunk]:
        position = (context.kv_len[:S] - 1).view(S, 1, 1)
        return _chunks(context.page_table[:S], max(context.kv_len_list[:S]), position, layout)

    out = _attend(q, cache, _planned(context, (layout, "decode"), make), layout)
    return out[:, :group].reshape(S, H, D).to(query.dtype)


def _prefill(query: Tensor, cache: Cache, context: AttentionContext, s: int, scale: float, layout: _Layout) -> Tensor:
    """The last L positions of sequence s: query [L, H, D] -> [L, H, D]."""
    L, H, D = query.shape
    group, kv_heads = layout.group, layout.kv_heads
    padded = L + -L % ROWS
    q = F.pad(query.float().mul(scale), (0, 0, 0, 0, 0, padded - L))
    q = q.view(padded, kv_heads, group, D).transpose(0, 1).reshape(kv_heads, padded * group, D)

    def make() -> list[_Chunk]:
        kv_len = context.kv_len_list[s]
        first = kv_len - L
        # Rows of padding see what the last one does.
        position = torch.arange(first, first + padded, device=query.device).clamp_max_(kv_len - 1)
        position = position.repeat_interleave(group)
        return _chunks(context.page_table[s : s + 1], kv_len, position.view(1, -1, 1), layout)

    out = _attend(q, cache, _planned(context, (layout, s), make), layout)
    return out.view(kv_heads, padded, group, D).transpose(0, 1).reshape(padded, H, D)[:L].to(query.dtype)


def _chunks(page_table: Tensor, length: int, position: Tensor, layout: _Layout) -> list[_Chunk]:
    """The plan for sequences [S] over ``length`` positions; ``position`` [S, R or 1, 1] is each query row's own."""
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
        hidden = at > position
        if layout.window is not None:
            hidden |= at <= position - layout.window
        chunks.append(_Chunk(pages, hidden.unsqueeze(1), hidden.all(dim=1).unsqueeze(1).unsqueeze(-1)))
    return chunks


def _attend(q: Tensor, cache: Cache, chunks: list[_Chunk], layout: _Layout) -> Tensor:
    """Online softmax over ``chunks``: q [S * Hkv, R, D] float32 -> [S * Hkv, R, D]."""
    B, R, D = q.shape
    maximum: Tensor | None = None
    total = weighted = torch.empty(())
    for chunk in chunks:
        C = chunk.hidden.shape[-1]
        keys, values = (_read(part, chunk.pages, C).view(B, C, D) for part in cache[:2])
        if len(cache) > 2:
            keys, values = (
                x * _read(s.unsqueeze(-1), chunk.pages, C).view(B, C, 1)
                for x, s in zip((keys, values), cache[2:], strict=True)
            )
        # A weight of 0 does not hide what is not finite.
        values.view(-1, layout.kv_heads, C, D).masked_fill_(chunk.unseen, 0)
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores.view(-1, layout.kv_heads, R, C).masked_fill_(chunk.hidden, float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True)
        if maximum is not None:
            highest = torch.maximum(maximum, highest)
        # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
        base = highest if layout.window is None else highest.masked_fill(highest == float("-inf"), 0.0)
        weights = scores.sub_(base).exp_()
        fresh, added = weights.sum(dim=-1, keepdim=True), torch.bmm(weights, values)
        if maximum is None:
            total, weighted = fresh, added
        else:
            decay = torch.exp(maximum - base)
            total, weighted = total * decay + fresh, weighted * decay + added
        maximum = highest
    return weighted / total.clamp_min(torch.finfo(torch.float32).tiny)


def _read(cache: Tensor, pages: Tensor, C: int) -> Tensor:
    """Pages [S * C / P] of a cache [pages, P, Hkv, ...] -> [S, Hkv, C, ...] float32."""
    found = as_bytes(cache).index_select(0, pages).view(cache.dtype)
    return found.unflatten(0, (-1, C // cache.shape[1])).flatten(1, 2).transpose(1, 2).float().contiguous()
