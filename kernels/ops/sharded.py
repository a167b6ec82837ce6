"""Operations of one rank of a tensor-parallel group, whose results are those of a single process bit for bit.

Every linear layer is cut along its outputs, and what the ranks computed is put side by side: nothing is added over
ranks, so every number is the sum of the same terms in the same order as without ranks. Attention is cut by heads, a
mixture by experts. Each rank has all activations and repeats what is small: norms, activation functions, rotary
positions, recurrences. A model notices nothing of this: it is built from ``ShardedOps`` as from ``Ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.attention import PagedAttention
from aiakq.kernels.ops.dense import DenseLayer
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.experts import GroupedExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import (
    ActivationLayout,
    AttentionContext,
    AttentionSpec,
    LayerCache,
    LinearInput,
    QWeight,
)

#: Shares of a weight are multiples of so many rows, as kernels lay rows out in tiles.
TILE = 32


class Collective(Protocol):
    """A rank's part in a group of ``size``; ``rank`` counts from 0."""

    rank: int
    size: int

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """x [M, own columns] of each rank -> [M, N], all of them side by side. Every rank calls it, in the same order.

        bounds  [size + 1] where the columns of each rank begin, and N.
        """


def shares(count: int, size: int, multiple: int = 1) -> list[int]:
    """[size + 1] where the shares of ``count`` items begin, and ``count``: multiples of ``multiple``, but for the last,
    as even as possible, the first ones larger.
    """
    units = -(-count // multiple)
    whole, more = divmod(units, size)
    bounds = [0]
    for rank in range(size):
        bounds.append(min(count, bounds[-1] + (whole + (rank < more)) * multiple))
    return bounds


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[int]:
    """[size + 1] where the query heads of each rank begin, and their number.

    A rank has whole groups of query heads, or a part of one group, so that its heads share keys evenly; where there are
    fewer key heads than ranks, several ranks hold the same one. A rank may have no head.
    """
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        return [bound * group for bound in shares(num_kv_heads, size)]
    ranks = shares(size, num_kv_heads)  # of each key head
    bounds = [0]
    for head in range(num_kv_heads):
        own = shares(group, ranks[head + 1] - ranks[head])
        bounds += [head * group + bound for bound in own[1:]]
    return bounds


class ShardedLinear(DenseLayer):
    """A linear layer whose outputs are distributed over the ranks.

    weight  all rows of it, until it is known whether this rank needs its share of them or, as an expert, all or none;
            then the layer is bound.
    """

    def __init__(self, n: int, collective: Collective, bind: Callable[[slice | None], LinearLayer]) -> None:
        """bind: makes the layer of the rows of a slice, or of all of them."""
        self._collective, self._bind = collective, bind
        self._bounds = shares(n, collective.size, TILE)
        self._layer: LinearLayer | None = None
        self.is_cut = False

    @property
    def num_outputs(self) -> int:
        """N."""
        return self._bounds[-1]

    def whole(self) -> LinearLayer:
        """The layer with all its outputs, which must not have been cut."""
        assert not self.is_cut, "the rest of the weight is gone"
        return self._bind(None)

    def cut(self) -> None:
        """Bind this rank's share, and let go of the rest."""
        if not self.is_cut:
            first, end = self._bounds[self._collective.rank :][:2]
            self._layer = self._bind(slice(first, end)) if end > first else None
            self.is_cut = True
            del self._bind

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See LinearLayer, with M rows."""
        self.cut()
        return None if self._layer is None else self._layer.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N]."""
        self.cut()
        if self._layer is None:
            assert isinstance(x, Tensor)
            own = torch.empty(len(x), 0, dtype=x.dtype, device=x.device)
        else:
            own = self._layer(x)
        return self._collective.gather(own, self._bounds)


def _sharded(layer: LinearLayer) -> ShardedLinear:
    assert isinstance(layer, ShardedLinear)
    return layer


def _whole(layer: LinearLayer) -> LinearLayer:
    return _sharded(layer).whole()


class ShardedEmbedding:
    """Rows of a table whose columns are distributed over the ranks; a rank without any only takes part."""

    def __init__(self, layer: EmbeddingLayer | None, bounds: Sequence[int], collective: Collective, ops: Ops) -> None:
        self._layer, self._bounds, self._collective, self._dtype = layer, bounds, collective, ops.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        own = torch.empty(len(ids), 0, dtype=self._dtype) if self._layer is None else self._layer(ids)
        return self._collective.gather(own, self._bounds)


class ShardedExperts:
    """Experts distributed over the ranks, each with all of its weights; the interface is GroupedExperts."""

    def __init__(self, own: GroupedExperts | None, bounds: Sequence[int], collective: Collective, width: int) -> None:
        """own: those of this rank. bounds: [size + 1] where each rank's begin. width: outputs N of an expert."""
        self._own, self._bounds, self._collective, self._width = own, bounds, collective, width

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] and counts [E] -> [S, N]."""
        starts = [0]
        for first, end in zip(self._bounds, self._bounds[1:], strict=False):
            starts.append(starts[-1] + sum(counts[first:end]))
        rank = self._collective.rank
        own = x[starts[rank] : starts[rank + 1]]
        if len(own):
            assert self._own is not None
            found = self._own(own, counts[self._bounds[rank] : self._bounds[rank + 1]])
        else:
            found = torch.empty(0, self._width, dtype=x.dtype, device=x.device)
        # All rows as one: those of a rank are side by side.
        bounds = [start * self._width for start in starts]
        return self._collective.gather(found.reshape(1, -1), bounds).view(len(x), self._width)


class ShardedAttention:
    """The attention of this rank's heads, given those of all; the interface is PagedAttention.

    own  attention of these heads, or None if there are none.
    """

    def __init__(self, spec: AttentionSpec, local: AttentionSpec | None, own: Any, ops: ShardedOps) -> None:
        self._spec, self._local, self._own, self._collective = spec, local, own, ops.collective
        self._copy = ops.scaling()
        bounds = head_shares(spec.num_heads, spec.num_kv_heads, ops.collective.size)
        self._bounds = [bound * spec.value_dim for bound in bounds]
        self._first = bounds[ops.collective.rank]

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """qkv [T, sum of spec.widths] -> [T, H * value_dim]; writes this rank's keys and values into ``cache``."""
        local, spec = self._local, self._spec
        if local is None:
            found = torch.empty(len(qkv), 0, dtype=qkv.dtype, device=qkv.device)
            return self._collective.gather(found, self._bounds)
        kv_head = self._first * spec.num_kv_heads // spec.num_heads
        starts = (self._first * spec.head_dim, kv_head * spec.head_dim, kv_head * spec.value_dim)
        own = torch.empty(len(qkv), sum(local.widths), dtype=qkv.dtype, device=qkv.device)
        theirs, at = 0, 0
        for width, whole, start in zip(local.widths, spec.widths, starts, strict=True):
            if width:
                self._copy(qkv[:, theirs + start : theirs + start + width], out=own[:, at : at + width])
            theirs, at = theirs + whole, at + width
        return self._collective.gather(self._own(own, positions, cache, context), self._bounds)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Not for ranks: only models that run through transformers write keys [T, Hkv, D] by themselves."""
        raise NotImplementedError

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Not for ranks, as ``write``: query [T, H, D]."""
        raise NotImplementedError


class ShardedOps(Ops):
    """The operations of one rank, over ``collective``."""

    def __init__(self, ops: Ops, collective: Collective) -> None:
        super().__init__(ops.device, ops.dtype, ops.kv_dtype, ops.excluded, ops.exact)
        self.collective = collective
        self._uncut: list[ShardedLinear] = []

    def linear(self, weight: QWeight, count: int = 1) -> LinearLayer:
        """See Ops: this rank's share of the rows of a weight [N, K]."""

        def bind(rows: slice | None) -> LinearLayer:
            own = weight if rows is None else weight.with_rows(torch.arange(rows.start, rows.stop))
            return super(ShardedOps, self).linear(own, count)

        return self._uncut_layer(weight.n, bind)

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> DenseLayer:
        """See Ops: this rank's share of the rows of a weight [N, K]."""

        def bind(rows: slice | None) -> LinearLayer:
            own = rows or slice(None)
            return super(ShardedOps, self).dense(weight[own], None if bias is None else bias[own], count)

        return self._uncut_layer(len(weight), bind)

    def _uncut_layer(self, n: int, bind: Callable[[slice | None], LinearLayer]) -> ShardedLinear:
        layer = ShardedLinear(n, self.collective, bind)
        self._uncut.append(layer)
        return layer

    def finish(self) -> None:
        """Bind this rank's shares of the linear layers since the last call: none of them is an expert."""
        for layer in self._uncut:
            layer.cut()
        self._uncut = []

    def experts(self, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation) -> GroupedExperts:
        """See Ops: this rank's share of the experts."""
        bounds = shares(len(pairs), self.collective.size)
        first, end = bounds[self.collective.rank :][:2]
        layers = [layer for pair in pairs for layer in pair]
        if not all(isinstance(layer, ShardedLinear) and not layer.is_cut for layer in layers):
            return super().experts(pairs, act)  # every rank has a share of every expert
        known = {id(layer) for layer in layers}
        self._uncut = [layer for layer in self._uncut if id(layer) not in known]
        own = [(_whole(gate_up), _whole(down)) for gate_up, down in pairs[first:end]]
        layer = super().experts(own, act) if own else None
        return ShardedExperts(layer, bounds, self.collective, _sharded(pairs[0][1]).num_outputs)

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """See Ops: this rank's share of the columns of a table [V, D]."""
        bounds = shares(table.shape[1], self.collective.size, TILE)
        first, end = bounds[self.collective.rank :][:2]
        own = super().embedding(table[:, first:end].contiguous()) if end > first else None
        return ShardedEmbedding(own, bounds, self.collective, self)

    def tied_embedding(self, table: Tensor) -> tuple[EmbeddingLayer, DenseLayer]:
        """See Ops: of a table [V, D] some columns for the embedding, and some rows for the head."""
        return self.embedding(table), self.dense(table)

    def attention(self, spec: AttentionSpec) -> PagedAttention:
        """See Ops: the attention of this rank's heads."""
        self.finish()
        local = self._local(spec)
        return ShardedAttention(spec, local, None if local is None else super().attention(local), self)

    def new_cache(self, spec: AttentionSpec, pages: int, page_size: int) -> LayerCache:
        """See Ops: the cache of this rank's heads."""
        local = self._local(spec)
        if local is None:
            return [torch.empty(pages, 0, dtype=self.dtype, device=self.device)]
        return super().new_cache(local, pages, page_size)

    def cache_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """See Ops: of this rank's heads."""
        local = self._local(spec)
        return 0 if local is None else super().cache_bytes(local, dtype)

    def _local(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The attention of this rank's heads; None if there are none."""
        bounds = head_shares(spec.num_heads, spec.num_kv_heads, self.collective.size)
        first, end = bounds[self.collective.rank :][:2]
        if first == end:
            return None
        group = spec.num_heads // spec.num_kv_heads
        own = slice(first, end)
        return replace(
            spec,
            num_heads=end - first,
            num_kv_heads=max(1, (end - first) // group),
            sinks=None if spec.sinks is None else spec.sinks[own].contiguous(),
            alibi=None if spec.alibi is None else spec.alibi[own].contiguous(),
        )
