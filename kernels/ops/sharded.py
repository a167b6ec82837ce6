"""Operations of one rank of a tensor-parallel group, whose results are those of a single process bit for bit.

Every linear layer is cut along its outputs, and what the ranks computed is put side by side: nothing is added over
ranks, so every number is the sum of the same terms in the same order as without ranks. Attention is cut by heads, a
mixture by experts. Each rank has all activations and repeats what is small: norms, activation functions, rotary
positions, recurrences. A model notices nothing of this: it is built from ``ShardedOps`` as from ``Ops``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

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
#: Implementations of linear layers on GPUs that compute an output in the same way whatever others there are.
UNIFORM = frozenset({"triton", "triton-w8a8"})


class Collective(Protocol):
    """A rank's part in a group of ``size``; ``rank`` counts from 0."""

    rank: int
    size: int

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """x [M, own columns] of each rank -> [M, N], all of them side by side. Every rank calls it, in the same order.

        bounds  [size + 1] where the columns of each rank begin, and N.
        """

    def sum(self, x: Tensor) -> Tensor:
        """x [M, N] of each rank -> [M, N] of the same dtype, all of them added up, with the same bits on every rank;
        x may be modified. Every rank calls it, in the same order.
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


@dataclass(frozen=True)
class DenseWeight:
    """What a layer without quantization is made of: a weight [N, K] and a bias [N], in floats."""

    perm: ClassVar[None] = None
    group_size: ClassVar[int] = 1

    weight: Tensor
    bias: Tensor | None

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    def with_rows(self, rows: Tensor) -> DenseWeight:
        """The rows ``rows`` [M] int64, in this order."""
        rows = rows.to(self.weight.device)
        return DenseWeight(self.weight[rows], None if self.bias is None else self.bias[rows])

    def with_inputs(self, first: int, end: int) -> DenseWeight:
        """The columns first .. end - 1."""
        return DenseWeight(self.weight[:, first:end].contiguous(), self.bias)


class ShardedLinear(DenseLayer):
    """A linear layer that is distributed over the ranks.

    weight  all of it, until it is known what this rank keeps; then the layer is bound.
    """

    def __init__(self, ops: ShardedOps, weight: QWeight | DenseWeight, count: int) -> None:
        """count: of the checkpoint's layers."""
        self._ops, self.weight, self._count = ops, weight, count
        self.n, self.k = weight.n, weight.k
        #: What this rank computes, and what is made of that.
        self._layer: LinearLayer | None = None
        self._after: Callable[[Tensor], Tensor] | None = None
        self.is_bound = False

    @property
    def own(self) -> LinearLayer | None:
        """What this rank computes of it; None: nothing, or nothing yet."""
        return self._layer

    def whole(self) -> LinearLayer:
        """The layer with all its outputs, which must not have been bound."""
        assert not self.is_bound, "the rest of the weight is gone"
        return self._ops.bind(self.weight, self._count, self.n)

    def repeat(self) -> None:
        """Compute all of it on every rank."""
        self._keep(self.weight, None)

    def cut(self) -> None:
        """Keep a share of the outputs; those of all ranks are put side by side."""
        collective = self._ops.collective
        bounds = shares(self.n, collective.size, TILE)
        first, end = bounds[collective.rank :][:2]
        own = self.weight.with_rows(torch.arange(first, end)) if end > first else None
        self._keep(own, lambda x: collective.gather(x, bounds))

    def keep_outputs(self, rows: Tensor) -> None:
        """Keep the outputs ``rows`` [M] int64 in this order, and give no others."""
        self._keep(self.weight.with_rows(rows), None)

    def keep_inputs(self, first: int, end: int) -> None:
        """Keep the inputs first .. end - 1, in the order of ``weight.perm``, which the layer is then given alone; what
        the ranks make of theirs is added up.
        """
        collective, own = self._ops.collective, self.weight.with_inputs(first, end)
        self._keep(own if collective.rank == 0 else replace(own, bias=None), collective.sum)

    def _keep(self, weight: QWeight | DenseWeight | None, after: Callable[[Tensor], Tensor] | None) -> None:
        assert not self.is_bound, "the rest of the weight is gone"
        self._layer = None if weight is None else self._ops.bind(weight, self._count, self.n)
        self._after, self.is_bound = after, True
        del self.weight

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See LinearLayer, with M rows."""
        self._ops.settle(self)
        return None if self._layer is None else self._layer.input_layout(m)

    def feeds(self, other: LinearLayer, parts: int) -> None:
        """See LinearLayer."""
        self._ops.pair(self, other, parts)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N], or of K and N what this rank keeps."""
        self._ops.settle(self)
        if self._layer is None:
            assert isinstance(x, Tensor)
            own = torch.empty(len(x), 0, dtype=x.dtype, device=x.device)
        else:
            own = self._layer(x)
        return own if self._after is None else self._after(own)


def _sharded(layer: LinearLayer) -> ShardedLinear:
    assert isinstance(layer, ShardedLinear)
    return layer


class ShardedEmbedding:
    """Rows of a table whose columns are distributed over the ranks; a rank without any only takes part."""

    def __init__(self, layer: EmbeddingLayer | None, bounds: Sequence[int], collective: Collective, ops: Ops) -> None:
        self._layer, self._bounds, self._collective, self._dtype = layer, bounds, collective, ops.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        if self._layer is None:
            own = torch.empty(len(ids), 0, dtype=self._dtype, device=ids.device)
        else:
            own = self._layer(ids)
        return self._collective.gather(own, self._bounds)


class ShardedExperts(GroupedExperts):
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
    """The operations of one rank, over ``collective``.

    uniform  see Ops.
    notes    how many layers are distributed in another way than most, and which, in words.
    """

    uniform = True

    def __init__(self, ops: Ops, collective: Collective) -> None:
        super().__init__(ops.device, ops.dtype, ops.kv_dtype, ops.excluded, ops.exact, self.uniform)
        self.collective = collective
        self.notes: Counter[str] = Counter()
        self._uncut: list[ShardedLinear] = []

    def describe(self) -> str:
        """How layers are distributed, for the start-up table."""
        return "; ".join(["outputs put side by side", *self._noted()])

    def _noted(self) -> list[str]:
        return [f"{count} x {note}" for note, count in self.notes.most_common()]

    def bind(self, weight: QWeight | DenseWeight, count: int, uncut_n: int) -> LinearLayer:
        """A layer of a weight [N, K] on this rank, which is all or a share of one of ``uncut_n`` outputs."""
        if isinstance(weight, QWeight):
            return self._linear(weight, count, uncut_n)
        return super().dense(weight.weight, weight.bias, count)

    def linear(self, weight: QWeight, count: int = 1) -> LinearLayer:
        """See Ops: a rank's share of a weight [N, K]."""
        return self._uncut_layer(weight, count)

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> DenseLayer:
        """See Ops: a rank's share of a weight [N, K]."""
        return self._uncut_layer(DenseWeight(weight, bias), count)

    def _uncut_layer(self, weight: QWeight | DenseWeight, count: int) -> ShardedLinear:
        layer = ShardedLinear(self, weight, count)
        self._uncut.append(layer)
        return layer

    def pair(self, first: ShardedLinear, second: LinearLayer, parts: int) -> None:
        """``second`` alone reads what ``first`` computes; see ``feeds`` of LinearLayer. All of it is gathered here."""

    def settle(self, layer: ShardedLinear) -> None:
        """Bind a layer if it is not: its share, or where a share might have other bits, all of it."""
        if layer.is_bound:
            return
        if self.device_type == "cuda" and not self._is_uniform(layer.weight):
            self.notes["linear layers whole on every rank, as torch multiplies"] += 1
            layer.repeat()
        else:
            layer.cut()

    def _is_uniform(self, weight: QWeight | DenseWeight) -> bool:
        """Whether an output of this layer on a GPU does not depend on how many others there are."""
        if isinstance(weight, DenseWeight):
            return False
        problem = weight.problem(self.dtype, self.device_type, self.exact, weight.n)
        return self.select("linear", problem)[0].name in UNIFORM

    def finish(self) -> None:
        """Bind this rank's shares of the linear layers since the last call: none of them is an expert."""
        for layer in self._uncut:
            self.settle(layer)
        self._uncut = []

    def experts(self, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation) -> GroupedExperts:
        """See Ops: this rank's share of the experts."""
        bounds = shares(len(pairs), self.collective.size)
        first, end = bounds[self.collective.rank :][:2]
        layers = [layer for pair in pairs for layer in pair]
        if not all(isinstance(layer, ShardedLinear) and not layer.is_bound for layer in layers):
            return super().experts(pairs, act)  # every rank has a share of every expert
        known = {id(layer) for layer in layers}
        self._uncut = [layer for layer in self._uncut if id(layer) not in known]
        own = [(_sharded(gate_up).whole(), _sharded(down).whole()) for gate_up, down in pairs[first:end]]
        layer = super().experts(own, act) if own else None
        return self._experts(layer, bounds, _sharded(pairs[0][1]).n)

    def _experts(self, own: GroupedExperts | None, bounds: Sequence[int], width: int) -> GroupedExperts:
        """The experts of all ranks; see ShardedExperts."""
        return ShardedExperts(own, bounds, self.collective, width)

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """See Ops: this rank's share of the columns of a table [V, D]."""
        bounds = shares(table.shape[1], self.collective.size, TILE)
        first, end = bounds[self.collective.rank :][:2]
        own = super().embedding(table[:, first:end].contiguous()) if end > first else None
        return ShardedEmbedding(own, bounds, self.collective, self)

    def tied_embedding(self, table: Tensor) -> tuple[EmbeddingLayer, DenseLayer]:
        """See Ops: of a table [V, D] some columns for the embedding, and some rows for the head."""
        return self.embedding(table), self.dense(table)

    def attention(
        self,
        spec: AttentionSpec,
        inputs: Sequence[tuple[LinearLayer, str]] = (),
        output: LinearLayer | None = None,
    ) -> PagedAttention:
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
