"""Attention over the paged KV cache in plain torch: the oracle of every other implementation, and the fallback.

Keys are walked in chunks of CHUNK positions, counted from position 0 of the sequence, with the running maximum and sum
of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Because chunk borders depend on positions alone,
and rows of a product do not depend on each other (rows are padded to a multiple of ROWS, below which BLAS switches to
another summation order), a token's result is the same bit for bit whether it came in a whole prompt, in a chunk of
one, or decoded next to any other sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionContext

CHUNK = 128
ROWS = 4


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store key and value [T, Hkv, D] at ``slots`` [T] of the caches [pages, P, Hkv, D], which are modified."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, key.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, value.to(v_cache.dtype))


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context: AttentionContext,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of query [T, H, D] over the cache; returns [T, H, D] in the query's dtype.

    The step's own keys must be in the cache already (``write_kv``). sliding_window W lets a query see itself and the
    W - 1 positions before it.
    """
    out = torch.zeros_like(query)
    if context.num_decodes:
        rows = slice(0, context.num_decodes)
        out[rows] = _decode(query[rows], k_cache, v_cache, context, scale, sliding_window)
    starts = context.query_start_list
    for s in range(context.num_decodes, len(starts) - 1):
        rows = slice(starts[s], starts[s + 1])
        pages = context.page_table[s : s + 1]
        out[rows] = _prefill(query[rows], k_cache, v_cache, pages, context.kv_len_list[s], scale, sliding_window)
    return out


def _decode(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, context: AttentionContext, scale: float, window: int | None
) -> Tensor:
    """One query per sequence, all sequences at once: query [S, H, D] -> [S, H, D]."""
    S, H, D = query.shape
    Hkv = k_cache.shape[2]
    group = H // Hkv
    q = query.float().mul(scale).view(S, Hkv, group, D)
    q = torch.nn.functional.pad(q, (0, 0, 0, -group % ROWS))
    position = (context.kv_len[:S] - 1).view(S, 1, 1)
    longest = max(context.kv_len_list[:S])
    state = _SoftmaxState(q)
    for keys, values, start in _chunks(k_cache, v_cache, context.page_table[:S], longest):
        state.add(q, keys, values, start, position, window)
    return state.result()[:, :, :group].reshape(S, H, D).to(query.dtype)


def _prefill(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, kv_len: int, scale: float, window: int | None
) -> Tensor:
    """The last L positions of one sequence: query [L, H, D] -> [L, H, D]."""
    L, H, D = query.shape
    Hkv = k_cache.shape[2]
    group = H // Hkv
    padded = L + -L % ROWS
    q = torch.nn.functional.pad(query.float().mul(scale), (0, 0, 0, 0, 0, padded - L))
    q = q.view(padded, Hkv, group, D).permute(1, 0, 2, 3).reshape(1, Hkv, padded * group, D)
    first = kv_len - L
    position = torch.arange(first, first + padded, device=query.device).repeat_interleave(group).view(1, -1, 1)
    state = _SoftmaxState(q)
    for keys, values, start in _chunks(k_cache, v_cache, pages, kv_len):
        state.add(q, keys, values, start, position, window)
    rows = state.result().view(Hkv, padded, group, D).permute(1, 0, 2, 3)
    return rows.reshape(padded, H, D)[:L].to(query.dtype)


def _chunks(k_cache: Tensor, v_cache: Tensor, page_table: Tensor, length: int):
    """Yield (keys [S, Hkv, D, C], values [S, Hkv, C, D], first position) in float32 over ``length`` positions."""
    P, Hkv, D = k_cache.shape[1:]
    per_chunk = max(1, CHUNK // P)
    S, width = page_table.shape
    for first in range(0, -(-length // P), per_chunk):
        table = page_table[:, first : first + per_chunk]
        if table.shape[1] < per_chunk:  # page 0 is a scratch page: masked below, always finite
            table = torch.nn.functional.pad(table, (0, per_chunk - table.shape[1]))
        table = table.long()
        keys = k_cache[table].view(S, per_chunk * P, Hkv, D).permute(0, 2, 3, 1).float()
        values = v_cache[table].view(S, per_chunk * P, Hkv, D).permute(0, 2, 1, 3).float()
        yield keys, values, first * P


class _SoftmaxState:
    """Running maximum, sum and weighted values of an online softmax over [S, Hkv, R, .]."""

    def __init__(self, q: Tensor) -> None:
        S, Hkv, R, D = q.shape
        self.maximum = q.new_full((S, Hkv, R, 1), float("-inf"))
        self.total = q.new_zeros((S, Hkv, R, 1))
        self.weighted = q.new_zeros((S, Hkv, R, D))

    def add(self, q: Tensor, keys: Tensor, values: Tensor, start: int, position: Tensor, window: int | None) -> None:
        """Take in one chunk. ``position`` [S, R or 1, 1] is each row's own position."""
        scores = torch.matmul(q, keys)
        at = torch.arange(start, start + keys.shape[-1], device=q.device)
        hidden = at > position
        if window is not None:
            hidden |= at <= position - window
        scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1, keepdim=True))
        # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
        base = maximum.masked_fill(maximum == float("-inf"), 0.0)
        weights = torch.exp(scores - base)
        decay = torch.exp(self.maximum - base)
        self.total = self.total * decay + weights.sum(dim=-1, keepdim=True)
        self.weighted = self.weighted * decay + torch.matmul(weights, values)
        self.maximum = maximum

    def result(self) -> Tensor:
        return self.weighted / self.total.clamp_min(torch.finfo(torch.float32).tiny)
