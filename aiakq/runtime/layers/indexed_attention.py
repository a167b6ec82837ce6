"""Latent attention over the positions that an index selects (DeepSeek Sparse Attention; DeepSeek-V3.2 2025,
arXiv:2512.02556; GLM-5).

The layer caches a small key per token besides its latent. For a query with more than ``top_k`` positions behind it,
the keys of all of them are scored, and attention reads the latents of the ``top_k`` best. Other queries attend to
everything, which is latent attention as in DeepSeek-V3.

The reference is transformers' module. The authors' release multiplies index queries and keys by a Hadamard matrix,
which leaves their products as they are, and rounds both to FP8, which does not: where scores differ by less than that
rounding, it may select other positions. Of positions with the same score, such as 0, the first ones are taken; neither
of the two states an order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.key_index import best_positions, index_scores, row_blocks
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.rotary import apply_rotary, rotary_factors
from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import (
    ActivationLayout,
    AttentionContext,
    AttentionSpec,
    LayerCache,
    LinearInput,
    RotaryTables,
)
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.latent_attention import LatentOutput, LatentProjection

T = TypeVar("T")

#: Key of a step's plans under which a layer leaves its selection for the layers that share it.
_SELECTION = "indexed positions"


class IndexedCache(tuple[Tensor, ...]):
    """The cache of a layer: the tensors of latents, then index keys [pages, P, D] unless the layer shares a selection.

    latents  the cache of attention.
    tokens   the same memory as pages of one token.
    keys     the index keys, or None.
    """

    latents: LayerCache
    tokens: LayerCache
    keys: Tensor | None

    @staticmethod
    def of(latents: LayerCache, keys: Tensor | None) -> IndexedCache:
        """Join the cache of attention, tensors [pages, P, 1, ...], and index keys [pages, P, D]."""
        cache = IndexedCache((*latents, *(() if keys is None else (keys,))))
        cache.latents, cache.keys = latents, keys
        cache.tokens = tuple(tensor.view(-1, 1, *tensor.shape[2:]) for tensor in latents)
        return cache


@dataclass
class _Part:
    """Some rows of a step that are sequences' last positions up to ``end``.

    sequence  number of the sequence in the step.
    rows      rows among the tokens of the step.
    end       number of positions up to the last row.
    """

    sequence: int
    rows: range
    end: int


@dataclass
class _Split:
    """The rows of a step with up to ``top_k`` positions and those with more; None if there are no others.

    few, many    rows [N] int64 of either kind.
    few_context  where the latents of the rows ``few`` are.
    parts        the rows ``many``, by sequence.
    """

    few: Tensor
    few_context: AttentionContext
    many: Tensor
    parts: list[_Part]


@dataclass
class Indexer:
    """Selects the positions that a query attends to.

    queries  projection from the normed low-rank queries of attention to H index queries of D elements.
    keys     projection from the hidden size to an index key.
    norm     layer norm of index keys.
    weights  projection from the hidden size to a weight per index head, float32.
    rotary   tables that rotate some elements of index queries and keys.
    first_rotated  number of the first of these.
    """

    queries: LinearLayer
    keys: LinearLayer
    norm: Norm
    weights: LinearLayer
    rotary: RotaryTables
    heads: int
    size: int
    top_k: int
    first_rotated: int = 0

    def write(self, x: Tensor, positions: Tensor, cache: Tensor, context: AttentionContext) -> None:
        """Store the index keys of x [T, hidden] at positions [T] in ``cache`` [pages, P, D]."""
        keys = self.norm(self.keys(x))
        assert isinstance(keys, Tensor)
        keys = keys.view(len(x), 1, self.size)
        rotate(keys[..., self.first_rotated :], self.rotary, positions, context)
        cache.view(-1, self.size)[context.slots] = keys[:, 0]

    def select(
        self, x: Tensor, low_rank: Tensor, positions: Tensor, cache: Tensor, context: AttentionContext, split: _Split
    ) -> AttentionContext:
        """Return where the latents are that the rows ``split.many`` attend to, for pages of one token.

        x          hidden states [T, hidden] at positions [T] int64.
        low_rank   normed low-rank queries [T, rank].
        cache      index keys [pages, P, D].
        """
        queries = self.queries(low_rank).view(len(x), self.heads, self.size)
        rotate(queries[..., self.first_rotated :], self.rotary, positions, context)
        weights = self.weights(x.float()) * self.heads**-0.5
        slots = torch.cat([self._slots(part, queries, weights, cache, context.page_table) for part in split.parts])
        rows = len(slots)
        return AttentionContext(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=slots.device),
            kv_len=torch.full((rows,), self.top_k, dtype=torch.int32, device=slots.device),
            slots=context.slots[:0],
            page_table=slots,
            num_decodes=rows,
            query_start_list=list(range(rows + 1)),
            kv_len_list=[self.top_k] * rows,
        )

    def _slots(self, part: _Part, queries: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor) -> Tensor:
        """Return the slots [R, top_k] int32 of the best positions of the rows of ``part``.

        queries     [T, H, D].
        weights     [T, H] float32.
        cache       index keys [pages, P, D].
        page_table  [S, pages of a sequence].
        """
        page_size, count = cache.shape[1], len(part.rows)
        pages = page_table[part.sequence, : -(-part.end // page_size)].long()
        keys = cache[pages].flatten(0, 1)[: part.end].float()
        lengths = torch.arange(part.end - count + 1, part.end + 1, device=cache.device)
        slots = []
        for block in row_blocks(count, self.heads, part.end):
            rows = slice(part.rows.start + block.start, part.rows.start + block.stop)
            scores = index_scores(queries[rows], weights[rows], keys, self.size**-0.5)
            best = best_positions(scores, lengths[block.start : block.stop], self.top_k)
            slots.append(pages[best // page_size] * page_size + best % page_size)
        return torch.cat(slots).to(torch.int32)


class IndexedLatentAttention(Attention):
    """Latent attention with an index of keys.

    rotary   tables for queries and keys; ``spec`` has none, because the layer itself rotates.
    indexer  selects positions; None for a layer that attends to those of the layer before it.
    top_k    number of positions that a query attends to at most.
    gate     projection to gates of the values, or None.
    """

    qkv: LatentProjection

    def __init__(
        self,
        projection: LatentProjection,
        output: LatentOutput,
        spec: AttentionSpec,
        ops: Ops,
        rotary: RotaryTables,
        indexer: Indexer | None,
        top_k: int,
        gate: LinearLayer | None = None,
    ) -> None:
        super().__init__(projection, output, spec, ops)
        self.rotary, self.indexer, self.top_k = rotary, indexer, top_k
        self.gate, self._sigmoid = gate, ops.activation("sigmoid")

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since several layers read the input."""
        return None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; updates ``cache``, an IndexedCache."""
        assert isinstance(x, Tensor) and isinstance(cache, IndexedCache) and self.qkv.queries is not None
        low_rank, latents, shared = self.qkv.projected(x)
        normed = self.qkv.queries.normed(low_rank)
        queries, gates = self.expanded(x, low_rank, normed)
        both = self.qkv.joined(queries, latents, shared).unflatten(1, (-1, self.spec.head_dim))
        rotate(both, self.rotary, positions, context)
        keys = both[:, -1:]
        self._attention.write(keys, keys[..., -self.spec.value_dim :], cache.latents, context.slots)
        split = _planned(context, ("indexed rows", self.top_k), lambda: _split(context, self.top_k))
        if self.indexer is not None and cache.keys is not None:
            self.indexer.write(x, positions, cache.keys, context)
            if split is not None:
                selected = self.indexer.select(x, normed, positions, cache.keys, context, split)
                context.plans[_SELECTION] = selected
        attended = self._attend(both[:, :-1], cache, context, split).flatten(1)
        return self.output(attended) if gates is None else self._gated_output(attended, gates)

    def expanded(self, x: Tensor, low_rank: Tensor, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the queries [T, H * query], and gates [T, H * value] of the values or None.

        x         hidden states [T, hidden].
        low_rank  low-rank queries [T, rank], and the same behind their norm, ``normed``.
        """
        assert self.qkv.queries is not None
        return self.qkv.queries.second(normed), None if self.gate is None else self.gate(x)

    def _gated_output(self, attended: Tensor, gates: Tensor) -> Tensor:
        """Weighted sums of latents [T, H * latent], times the sigmoid of gates [T, H * value] as values ->
        [T, hidden].
        """
        assert isinstance(self.output, LatentOutput)
        both = torch.cat([gates, self.output.values(attended)], dim=1)
        return self.output.output(self._sigmoid.gated(both, self.output.output.input_layout(len(both))))

    def _attend(self, query: Tensor, cache: IndexedCache, context: AttentionContext, split: _Split | None) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, value_dim]."""
        if split is None:
            return self._attention.attend(query, cache.latents, context)
        out = query.new_zeros(*query.shape[:2], self.spec.value_dim)
        if len(split.few):
            out[split.few] = self._attention.attend(query[split.few], cache.latents, split.few_context)
        out[split.many] = self._attention.attend(query[split.many], cache.tokens, context.plans[_SELECTION])
        return out

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's latent in a cache of ``dtype``, and its index key in that of activations."""
        index = 0 if self.indexer is None else self.indexer.size * self._ops.dtype.itemsize
        return super().cache_bytes(dtype) + index

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Allocate the cache of latents and of index keys, filled with zeros."""
        keys = None
        if self.indexer is not None:
            shape = (pages, page_size, self.indexer.size)
            keys = torch.zeros(shape, dtype=self._ops.dtype, device=self._ops.device)
        return IndexedCache.of(super().new_cache(pages, page_size, state_rows), keys)


class FusedGateAttention(IndexedLatentAttention):
    """Attention whose values are gated, with gates and queries from one layer that reads the low-rank queries before
    and behind their norm (A.X K2).
    """

    def expanded(self, x: Tensor, low_rank: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """See IndexedLatentAttention: x [T, hidden], low_rank and normed [T, rank]."""
        assert self.qkv.queries is not None
        query, heads = self.qkv.sizes.query, self.qkv.sizes.heads
        both = self.qkv.queries.second(torch.cat([normed, low_rank], dim=1)).unflatten(1, (heads, -1))
        return both[..., :query].flatten(1), both[..., query:].flatten(1)


def rotate(x: Tensor, tables: RotaryTables, positions: Tensor, context: AttentionContext) -> None:
    """Rotate the first elements of all heads of x [T, H, D] at positions [T] int64 in place."""
    factors = _planned(context, ("float factors", tables), lambda: rotary_factors(tables, positions, torch.float32))
    part = x[..., : tables.rotated]
    part.copy_(apply_rotary(part.float(), factors, tables.interleaved))


def _planned(context: AttentionContext, key: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return the plan ``key`` of this step, computed by the first layer that needs it."""
    if key not in context.plans:
        context.plans[key] = make()
    plan: T = context.plans[key]
    return plan


def _split(context: AttentionContext, top_k: int) -> _Split | None:
    """Return which rows of a step have more than ``top_k`` positions; None if there are none."""
    assert context.row_ends is None, "tokens of images have no index"
    starts, few, many = context.query_start_list, [], []
    for sequence, (begin, end, length) in enumerate(zip(starts, starts[1:], context.kv_len_list, strict=False)):
        first = length - (end - begin)
        middle = begin + min(end - begin, max(0, top_k - first))
        if middle > begin:
            few.append(_Part(sequence, range(begin, middle), first + middle - begin))
        if end > middle:
            many.append(_Part(sequence, range(middle, end), length))
    if not many:
        return None
    return _Split(_rows(few, context), _few_context(few, context), _rows(many, context), many)


def _rows(parts: Sequence[_Part], context: AttentionContext) -> Tensor:
    """Return the rows [N] int64 of ``parts``."""
    return on_device([row for part in parts for row in part.rows], context.slots.device, torch.int64)


def _few_context(parts: Sequence[_Part], context: AttentionContext) -> AttentionContext:
    """Return where the latents of ``parts`` are, whose rows come one after the other."""
    device, starts = context.slots.device, [0]
    for part in parts:
        starts.append(starts[-1] + len(part.rows))
    lengths = [part.end for part in parts]
    return AttentionContext(
        query_start=on_device(starts, device, torch.int32),
        kv_len=on_device(lengths, device, torch.int32),
        slots=context.slots[:0],
        page_table=context.page_table[on_device([part.sequence for part in parts], device, torch.int64)],
        num_decodes=sum(part.sequence < context.num_decodes for part in parts),
        query_start_list=starts,
        kv_len_list=lengths,
    )
