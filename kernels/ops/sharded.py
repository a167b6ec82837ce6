"""Operations of one rank of a tensor-parallel group whose results are bit-identical to those of a single process.

Every linear layer is sharded along its outputs, and the outputs of all ranks are gathered: nothing is reduced over
ranks, so every value is the sum of the same terms in the same order as on one rank. Attention is sharded by heads, a
mixture by experts. Every rank holds all activations and replicates what is small: norms, activation functions, rotary
embeddings, recurrences. Models need no changes: they are built from ``ShardedOps`` in the same way as from ``Ops``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

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

#: Shards of a weight are multiples of this many rows, the tile size in which kernels pack rows.
TILE = 32
#: GPU implementations of linear layers in which an output does not depend on the number of outputs.
UNIFORM = frozenset({"triton", "triton-w8a8"})


class Collective(Protocol):
    """Collective operations of one rank in a group of ``size``; ``rank`` counts from 0."""

    rank: int
    size: int

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """Gather x [M, local columns] of each rank -> [M, N]. Called by every rank in the same order.

        bounds  [size + 1] first column of each rank, and N.
        """

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce x [M, N] -> [M, N] of the same dtype, with the same bits on every rank; x may be modified. Called
        by every rank in the same order.
        """


def shares(count: int, size: int, multiple: int = 1) -> list[int]:
    """Split ``count`` items into shards: return [size + 1] first index of each shard, and ``count``. Shards are
    multiples of ``multiple`` (except the last), as even as possible, larger ones first.
    """
    units = -(-count // multiple)
    quotient, remainder = divmod(units, size)
    bounds = [0]
    for rank in range(size):
        bounds.append(min(count, bounds[-1] + (quotient + (rank < remainder)) * multiple))
    return bounds


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[int]:
    """Split query heads into shards: return [size + 1] first query head of each rank, and their number.

    A rank has whole groups of query heads, or part of one group, so that its heads share key heads evenly; if there are
    fewer key heads than ranks, several ranks replicate the same one. A rank may have no heads.
    """
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        return [bound * group for bound in shares(num_kv_heads, size)]
    ranks = shares(size, num_kv_heads)  # ranks of each key head
    bounds = [0]
    for head in range(num_kv_heads):
        local_bounds = shares(group, ranks[head + 1] - ranks[head])
        bounds += [head * group + bound for bound in local_bounds[1:]]
    return bounds


@dataclass(frozen=True)
class DenseWeight:
    """The parameters of an unquantized linear layer: a float weight [N, K] and bias [N]."""

    perm: ClassVar[None] = None
    rotated: ClassVar[bool] = False
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
        """Return the layer with the rows ``rows`` [M] int64 of the weight, in this order."""
        rows = rows.to(self.weight.device)
        return DenseWeight(self.weight[rows], None if self.bias is None else self.bias[rows])

    def with_inputs(self, first: int, end: int) -> DenseWeight:
        """Return the layer with the input columns first .. end - 1."""
        return DenseWeight(self.weight[:, first:end].contiguous(), self.bias)


class ShardedLinear(DenseLayer):
    """A linear layer that is distributed over the ranks.

    weight  the whole weight, until this rank's shard is known and the layer is bound.
    """

    def __init__(self, ops: ShardedOps, weight: QWeight | DenseWeight, count: int) -> None:
        """count: number of checkpoint layers that this one replaces."""
        self._ops, self.weight, self._count = ops, weight, count
        self.n, self.k = weight.n, weight.k
        #: This rank's shard, and the collective that is applied to its output.
        self._layer: LinearLayer | None = None
        self._after: Callable[[Tensor], Tensor] | None = None
        self.is_bound = False

    @property
    def own(self) -> LinearLayer | None:
        """This rank's shard; None if it is empty or the layer is not bound yet."""
        return self._layer

    def whole(self) -> LinearLayer:
        """Return the layer with all its outputs; it must not be bound yet."""
        assert not self.is_bound, "the rest of the weight is gone"
        return self._ops.bind(self.weight, self._count, self.n)

    def repeat(self) -> None:
        """Replicate the layer on every rank."""
        self._keep(self.weight, None)

    def cut(self) -> None:
        """Shard the layer along its outputs and gather those of all ranks."""
        collective = self._ops.collective
        bounds = shares(self.n, collective.size, TILE)
        first, end = bounds[collective.rank :][:2]
        shard = self.weight.with_rows(torch.arange(first, end)) if end > first else None
        self._keep(shard, lambda x: collective.gather(x, bounds))

    def keep_outputs(self, rows: Tensor) -> None:
        """Keep only the outputs ``rows`` [M] int64, in this order, without gathering."""
        self._keep(self.weight.with_rows(rows), None)

    def keep_inputs(self, first: int, end: int) -> None:
        """Keep only the inputs first .. end - 1, in the order of ``weight.perm``; the layer is then called with just
        these, and the outputs are all-reduced over the ranks.
        """
        collective, own = self._ops.collective, self.weight.with_inputs(first, end)
        self._keep(own if collective.rank == 0 else replace(own, bias=None), collective.sum)

    def _keep(self, weight: QWeight | DenseWeight | None, after: Callable[[Tensor], Tensor] | None) -> None:
        assert not self.is_bound, "the rest of the weight is gone"
        self._layer = None if weight is None else self._ops.bind(weight, self._count, self.n)
        self._after, self.is_bound = after, True
        del self.weight

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See LinearLayer; the input has M rows."""
        self._ops.settle(self)
        return None if self._layer is None else self._layer.input_layout(m)

    def feeds(self, other: LinearLayer, parts: int) -> None:
        """See LinearLayer."""
        self._ops.pair(self, other, parts)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N], where K and N are local sizes if the layer keeps only a shard of them."""
        self._ops.settle(self)
        if self._layer is None:
            assert isinstance(x, Tensor)
            out = torch.empty(len(x), 0, dtype=x.dtype, device=x.device)
        else:
            out = self._layer(x)
        return out if self._after is None else self._after(out)


def _sharded(layer: LinearLayer) -> ShardedLinear:
    assert isinstance(layer, ShardedLinear)
    return layer


class ShardedEmbedding:
    """Embedding whose columns are sharded over the ranks; a rank without columns only joins the gather."""

    def __init__(self, layer: EmbeddingLayer | None, bounds: Sequence[int], collective: Collective, ops: Ops) -> None:
        self._layer, self._bounds, self._collective, self._dtype = layer, bounds, collective, ops.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        if self._layer is None:
            out = torch.empty(len(ids), 0, dtype=self._dtype, device=ids.device)
        else:
            out = self._layer(ids)
        return self._collective.gather(out, self._bounds)


class ShardedExperts(GroupedExperts):
    """Experts distributed over the ranks, each with all of its weights; the interface is GroupedExperts."""

    def __init__(self, own: GroupedExperts | None, bounds: Sequence[int], collective: Collective, width: int) -> None:
        """own: experts of this rank. bounds: [size + 1] first expert of each rank. width: outputs N of an expert."""
        self._own, self._bounds, self._collective, self._width = own, bounds, collective, width

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] and counts [E] -> [S, N]."""
        starts = [0]
        for first, end in zip(self._bounds, self._bounds[1:], strict=False):
            starts.append(starts[-1] + sum(counts[first:end]))
        rank = self._collective.rank
        rows = x[starts[rank] : starts[rank + 1]]
        if len(rows):
            assert self._own is not None
            out = self._own(rows, counts[self._bounds[rank] : self._bounds[rank + 1]])
        else:
            out = torch.empty(0, self._width, dtype=x.dtype, device=x.device)
        # Gather as a single row: the rows of each rank are contiguous.
        bounds = [start * self._width for start in starts]
        return self._collective.gather(out.reshape(1, -1), bounds).view(len(x), self._width)


class ShardedAttention:
    """Attention over this rank's heads, whose input contains all heads; the interface is PagedAttention.

    own  attention of this rank's heads, or None if it has none.
    """

    def __init__(self, spec: AttentionSpec, local: AttentionSpec | None, own: object, ops: ShardedOps) -> None:
        self._spec, self._local, self._own, self._collective = spec, local, own, ops.collective
        self._copy = ops.scaling()
        bounds = head_shares(spec.num_heads, spec.num_kv_heads, ops.collective.size)
        self._bounds = [bound * spec.value_dim for bound in bounds]
        self._first = bounds[ops.collective.rank]

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """qkv [T, sum of spec.widths] -> [T, H * value_dim]; writes this rank's keys and values to ``cache``."""
        local, spec = self._local, self._spec
        if local is None:
            out = torch.empty(len(qkv), 0, dtype=qkv.dtype, device=qkv.device)
            return self._collective.gather(out, self._bounds)
        kv_head = self._first * spec.num_kv_heads // spec.num_heads
        starts = (self._first * spec.head_dim, kv_head * spec.head_dim, kv_head * spec.value_dim)
        local_qkv = torch.empty(len(qkv), sum(local.widths), dtype=qkv.dtype, device=qkv.device)
        source, offset = 0, 0
        for width, full_width, start in zip(local.widths, spec.widths, starts, strict=True):
            if width:
                self._copy(qkv[:, source + start : source + start + width], out=local_qkv[:, offset : offset + width])
            source, offset = source + full_width, offset + width
        return self._collective.gather(self._own(local_qkv, positions, cache, context), self._bounds)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Not supported on ranks: only models that run through transformers write key [T, Hkv, D] separately."""
        raise NotImplementedError

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Not supported on ranks, like ``write``: query [T, H, D]."""
        raise NotImplementedError


class ShardedOps(Ops):
    """The operations of one rank over ``collective``.

    uniform  see Ops.
    notes    layers that are distributed differently from the default, as text, and their number.
    """

    uniform = True

    def __init__(self, ops: Ops, collective: Collective) -> None:
        super().__init__(ops.device, ops.dtype, ops.kv_dtype, ops.excluded, ops.exact, self.uniform)
        self.collective = collective
        self.notes: Counter[str] = Counter()
        self._uncut: list[ShardedLinear] = []

    def describe(self) -> str:
        """Return how layers are distributed, for the start-up table."""
        return "; ".join(["outputs put side by side", *self._noted()])

    def _noted(self) -> list[str]:
        return [f"{count} x {note}" for note, count in self.notes.most_common()]

    def bind(self, weight: QWeight | DenseWeight, count: int, uncut_n: int) -> LinearLayer:
        """Bind a weight [N, K] on this rank, which is a whole layer with ``uncut_n`` outputs or a shard of one."""
        if isinstance(weight, QWeight):
            return self._linear(weight, count, uncut_n)
        return super().dense(weight.weight, weight.bias, count)

    def linear(self, weight: QWeight, count: int = 1) -> LinearLayer:
        """See Ops: this rank's shard of a weight [N, K]."""
        return self._uncut_layer(weight, count)

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> DenseLayer:
        """See Ops: this rank's shard of a weight [N, K]."""
        return self._uncut_layer(DenseWeight(weight, bias), count)

    def _uncut_layer(self, weight: QWeight | DenseWeight, count: int) -> ShardedLinear:
        layer = ShardedLinear(self, weight, count)
        self._uncut.append(layer)
        return layer

    def pair(self, first: ShardedLinear, second: LinearLayer, parts: int) -> None:
        """Shard two consecutive layers; see ``feeds`` of LinearLayer. This class gathers both, so it does nothing."""

    def settle(self, layer: ShardedLinear) -> None:
        """Bind a layer if it is not bound yet: shard it, or replicate it if a shard could give other bits."""
        if layer.is_bound:
            return
        if self.device_type == "cuda" and not self._is_uniform(layer.weight):
            self.notes["linear layers whole on every rank, as torch multiplies"] += 1
            layer.repeat()
        else:
            layer.cut()

    def _is_uniform(self, weight: QWeight | DenseWeight) -> bool:
        """Whether an output of this layer on a GPU is independent of the number of outputs."""
        if isinstance(weight, DenseWeight):
            return False
        problem = weight.problem(self.dtype, self.device_type, self.exact, weight.n)
        return self.select("linear", problem)[0].name in UNIFORM

    def finish(self) -> None:
        """Bind the linear layers created since the last call; none of them is an expert."""
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
        """Bind the experts of all ranks; see ShardedExperts."""
        return ShardedExperts(own, bounds, self.collective, width)

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """See Ops: this rank's share of the columns of ``table`` [V, D]."""
        bounds = shares(table.shape[1], self.collective.size, TILE)
        first, end = bounds[self.collective.rank :][:2]
        own = super().embedding(table[:, first:end].contiguous()) if end > first else None
        return ShardedEmbedding(own, bounds, self.collective, self)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[EmbeddingLayer, DenseLayer]:
        """See Ops: ``table`` [V, D] is sharded along its columns for the embedding, its rows for the output layer."""
        return self.embedding(table), self.dense(table, bias)

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
        """See Ops: bytes of this rank's heads."""
        local = self._local(spec)
        return 0 if local is None else super().cache_bytes(local, dtype)

    def _local(self, spec: AttentionSpec) -> AttentionSpec | None:
        """Return the attention of this rank's heads, or None if it has none."""
        bounds = head_shares(spec.num_heads, spec.num_kv_heads, self.collective.size)
        first, end = bounds[self.collective.rank :][:2]
        if first == end:
            return None
        group = spec.num_heads // spec.num_kv_heads
        heads = slice(first, end)
        return replace(
            spec,
            num_heads=end - first,
            num_kv_heads=max(1, (end - first) // group),
            sinks=None if spec.sinks is None else spec.sinks[heads].contiguous(),
            alibi=None if spec.alibi is None else spec.alibi[heads].contiguous(),
        )
