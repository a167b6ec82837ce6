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
from aiakq.kernels.ops.experts import GroupedExperts, PairExperts, Routed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, ExpertRole, Replicated, Role
from aiakq.kernels.types import (
    ActivationLayout,
    AttentionContext,
    AttentionSpec,
    ExpertsProblem,
    LayerCache,
    LinearInput,
    QWeight,
)

#: Shards of a weight are multiples of this many rows, the tile size in which kernels pack rows.
TILE = 32
#: GPU implementations of linear layers in which an output does not depend on the number of outputs.
UNIFORM = frozenset({"triton", "triton-floats", "triton-fp8", "triton-w8a8"})


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

    def with_bias(self, bias: Tensor | None) -> DenseWeight:
        """Return the layer with another bias [N]."""
        return DenseWeight(self.weight, bias)

    def with_rows(self, rows: Tensor) -> DenseWeight:
        """Return the layer with the rows ``rows`` [M] int64 of the weight, in this order."""
        rows = rows.to(self.weight.device)
        return DenseWeight(self.weight[rows], None if self.bias is None else self.bias[rows])

    def with_inputs(self, first: int, end: int) -> DenseWeight:
        """Return the layer with the input columns first .. end - 1."""
        return DenseWeight(self.weight[:, first:end].contiguous(), self.bias)


class ShardedLinear(DenseLayer):
    """One rank's shard of a linear layer.

    n, k    outputs and inputs of the whole layer.
    own     this rank's shard; None if it is empty.
    inputs  [local K] int64, the inputs of a row-parallel shard, which is called with just these; else None.
    reason  why the layer is gathered although it has another role; else empty.
    after   the collective that is applied to the output, or None.
    """

    def __init__(
        self,
        weight: QWeight | DenseWeight,
        own: LinearLayer | None,
        after: Callable[[Tensor], Tensor] | None = None,
        inputs: Tensor | None = None,
        reason: str = "",
        local_outputs: bool = False,
    ) -> None:
        """weight: the whole weight, which is not kept. local_outputs: whether the layer is column-parallel."""
        self.n, self.k = weight.n, weight.k
        self.own, self.after, self.inputs, self.reason = own, after, inputs, reason
        self.has_local_outputs, self.has_local_inputs = local_outputs, inputs is not None

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See LinearLayer; the input has M rows."""
        return None if self.own is None else self.own.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N], where K and N are local sizes if the layer keeps only a shard of them."""
        if self.own is None:
            assert isinstance(x, Tensor)
            out = torch.empty(len(x), 0, dtype=x.dtype, device=x.device)
        else:
            out = self.own(x)
        return out if self.after is None else self.after(out)


def _unwrapped(layer: LinearLayer) -> LinearLayer:
    """Return a whole layer of this rank without its wrapper."""
    return layer.own if isinstance(layer, ShardedLinear) and layer.own is not None else layer


class ShardedEmbedding:
    """Embedding whose columns are sharded over the ranks; a rank without columns only joins the gather."""

    def __init__(self, layer: EmbeddingLayer | None, bounds: Sequence[int], collective: Collective, ops: Ops) -> None:
        self._layer, self._bounds, self._collective, self._dtype = layer, bounds, collective, ops.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        empty = torch.empty(len(ids), 0, dtype=self._dtype, device=ids.device)
        return self._collective.gather(empty if self._layer is None else self._layer(ids), self._bounds)


class ShardedRows:
    """Embedding whose rows are sharded over the ranks: each looks up its own, and zeros for those of others."""

    def __init__(
        self, layer: EmbeddingLayer | None, first: int, end: int, width: int, collective: Collective, ops: Ops
    ) -> None:
        """layer: rows first .. end - 1 of the table, or None if there are none. width: columns D of the table."""
        self._layer, self._first, self._end, self._width = layer, first, end, width
        self._collective, self._dtype = collective, ops.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        if self._layer is None:
            out = torch.zeros(len(ids), self._width, dtype=self._dtype, device=ids.device)
        else:
            out = self._layer((ids - self._first).clamp(0, self._end - self._first - 1))
            out.masked_fill_(((ids < self._first) | (ids >= self._end)).unsqueeze(1), 0)
        # Every row is that of one rank: the sum is exact.
        return self._collective.sum(out)


class ShardedExperts(GroupedExperts):
    """Experts distributed over the ranks, each with all of its weights; the interface is GroupedExperts."""

    def __init__(self, own: GroupedExperts | None, bounds: Sequence[int], collective: Collective, width: int) -> None:
        """own: experts of this rank. bounds: [size + 1] first expert of each rank. width: outputs N of an expert."""
        self._own, self._bounds, self._collective, self._width = own, bounds, collective, width

    @property
    def host_reason(self) -> str | None:
        """See GroupedExperts."""
        return super().host_reason if self._own is None else self._own.host_reason

    def mixture(self, x: Tensor, routed: Routed) -> Tensor:
        """x [T, K] -> [T, N] float32; see GroupedExperts."""
        own = self._own
        return self._pairs(own, x, routed) if isinstance(own, PairExperts) else super().mixture(x, routed)

    def _pairs(self, own: PairExperts, x: Tensor, routed: Routed) -> Tensor:
        """The same with experts whose pairs are computed at once."""
        # Every row is that of one rank, and zero on the others: their sum is exact.
        outputs = self._collective.sum(own.outputs(x, routed, zeros=True))
        return own.weighted_sums(outputs, routed, own=False)

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
    """Attention over this rank's heads; the interface is PagedAttention.

    own            attention of this rank's heads, or None if it has none.
    local_inputs   whether the input contains only this rank's heads.
    local_outputs  whether to return only this rank's heads, instead of gathering those of all.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        local: AttentionSpec | None,
        own: PagedAttention | None,
        ops: ShardedOps,
        local_inputs: bool,
        local_outputs: bool,
    ) -> None:
        self._spec, self._local, self._own, self._collective = spec, local, own, ops.collective
        self._local_inputs, self._local_outputs = local_inputs, local_outputs
        self._copy = ops.scaling()
        self._bounds = [bound * spec.value_dim for bound in ops.head_bounds(spec)]
        first = ops.head_bounds(spec)[ops.collective.rank]
        kv_head = first * spec.num_kv_heads // spec.num_heads
        heads, kv_heads = (0, 0) if local is None else (local.num_heads, local.num_kv_heads)
        self._heads, self._kv_heads = slice(first, first + heads), slice(kv_head, kv_head + kv_heads)
        self._starts = first * spec.head_dim, kv_head * spec.head_dim, kv_head * spec.value_dim

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """qkv [T, sum of spec.widths] -> [T, H * value_dim], with local widths instead of these on either side if so
        specified; writes this rank's keys and values to ``cache``.
        """
        out = torch.empty(len(qkv), 0, dtype=qkv.dtype, device=qkv.device)
        if self._own is not None:
            out = self._own(qkv if self._local_inputs else self._local_part(qkv), positions, cache, context)
        return out if self._local_outputs else self._collective.gather(out, self._bounds)

    def _local_part(self, qkv: Tensor) -> Tensor:
        """Copy the columns of this rank's heads: qkv [T, sum of spec.widths] -> [T, sum of local widths]."""
        assert self._local is not None
        local_qkv = torch.empty(len(qkv), sum(self._local.widths), dtype=qkv.dtype, device=qkv.device)
        source, offset = 0, 0
        for width, full_width, start in zip(self._local.widths, self._spec.widths, self._starts, strict=True):
            if width:
                self._copy(qkv[:, source + start : source + start + width], out=local_qkv[:, offset : offset + width])
            source, offset = source + full_width, offset + width
        return local_qkv

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store this rank's of the key heads [T, Hkv, D] and value heads [T, Hkv, value_dim] at ``slots`` [T]."""
        if self._own is not None:
            self._own.write(key[:, self._kv_heads], value[:, self._kv_heads], cache, slots)

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] over this rank's heads, gathered from all ranks -> [T, H, value_dim]."""
        empty = query.new_empty(len(query), 0)
        out = empty if self._own is None else self._own.attend(query[:, self._heads], cache, context).flatten(1)
        return self._collective.gather(out, self._bounds).unflatten(1, (self._spec.num_heads, -1))


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

    def describe(self) -> str:
        """Return how layers are distributed, for the start-up table."""
        return "; ".join(["outputs put side by side", *self._noted()])

    def _noted(self) -> list[str]:
        return [f"{count} x {note}" for note, count in self.notes.most_common()]

    def linear(self, weight: QWeight, count: int = 1, role: Role = GATHERED) -> LinearLayer:
        """See Ops: this rank's shard of a weight [N, K]."""
        return self._shard(weight, count, role)

    def quantized_embedding(self, weight: QWeight, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None] | None:
        """See Ops: this rank's rows of a weight [V, D], from which it looks up tokens and computes outputs."""
        if not self._looks_up_rows(weight):
            return None
        collective, bounds = self.collective, shares(weight.n, self.collective.size, TILE)
        first, end = self._share(bounds)
        embedding, own = None, None
        if end > first:
            embedding, own = self._lookup(weight.with_rows(torch.arange(first, end)), tied, weight.n)
        head = ShardedLinear(weight, own, lambda x: collective.gather(x, bounds)) if tied else None
        return ShardedRows(embedding, first, end, weight.k, collective, self), head

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1, role: Role = GATHERED) -> DenseLayer:
        """See Ops: this rank's shard of a weight [N, K]."""
        return self._shard(DenseWeight(weight, bias), count, role)

    def _shard(self, weight: QWeight | DenseWeight, count: int, role: Role) -> ShardedLinear:
        """Bind this rank's shard of a weight with ``role``, of which this class gathers all but those of whole layers.

        It replicates layers of which a shard could give other bits.
        """
        if isinstance(role, Replicated):
            return self._whole(weight, count)
        if isinstance(role, ExpertRole):
            first, end = self._share(shares(role.count, self.collective.size))
            return self._whole(weight, count) if first <= role.index < end else ShardedLinear(weight, None)
        if self.device_type == "cuda" and not self._is_uniform(weight):
            self.notes["linear layers whole on every rank, as torch multiplies"] += 1
            return self._whole(weight, count)
        return self._gathered(weight, count)

    def _share(self, bounds: Sequence[int]) -> tuple[int, int]:
        """Return this rank's range of ``bounds`` [size + 1]."""
        return bounds[self.collective.rank], bounds[self.collective.rank + 1]

    def _whole(self, weight: QWeight | DenseWeight, count: int) -> ShardedLinear:
        return ShardedLinear(weight, self._own(weight, count, weight.n))

    def _gathered(self, weight: QWeight | DenseWeight, count: int, reason: str = "") -> ShardedLinear:
        """Bind a shard of the outputs and gather those of all ranks; ``reason``: see ShardedLinear."""
        collective = self.collective
        bounds = shares(weight.n, collective.size, TILE)
        first, end = self._share(bounds)
        own = self._own(weight.with_rows(torch.arange(first, end)), count, weight.n) if end > first else None
        return ShardedLinear(weight, own, lambda x: collective.gather(x, bounds), reason=reason)

    def _own(self, weight: QWeight | DenseWeight, count: int, uncut_n: int) -> LinearLayer:
        """Bind a weight [N, K] on this rank, which is a whole layer with ``uncut_n`` outputs or a shard of one."""
        if isinstance(weight, QWeight):
            return self._linear(weight, count, uncut_n)
        return super().dense(weight.weight, weight.bias, count)

    def _is_uniform(self, weight: QWeight | DenseWeight) -> bool:
        """Whether an output of this layer on a GPU is independent of the number of outputs."""
        if isinstance(weight, DenseWeight):
            return False
        problem = weight.problem(self.dtype, self.device_type, self.exact, weight.n)
        return self.select("linear", problem)[0].name in UNIFORM

    def experts(
        self, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation, gated: bool = True
    ) -> GroupedExperts:
        """See Ops: this rank's share of the experts, which were made with the role of each."""
        bounds = shares(len(pairs), self.collective.size)
        first, end = self._share(bounds)
        own = [(_unwrapped(gate_up), _unwrapped(down)) for gate_up, down in pairs[first:end]]
        if not isinstance(last := pairs[0][1], ShardedLinear) or last.after is not None:
            return super().experts(pairs, act, gated)  # without their role, every rank has a share of every expert
        # A GPU computes pairs at once, for which ranks meet in another way: also those without experts.
        needed = own or self.select("experts", ExpertsProblem(self.dtype, self.device_type))[0].name == "triton"
        grouped = self._experts_from(first, own, act, gated) if needed else None
        return self._with_sigmoid(self._experts(grouped, bounds, last.n))

    def _experts(self, own: GroupedExperts | None, bounds: Sequence[int], width: int) -> GroupedExperts:
        """Bind the experts of all ranks; see ShardedExperts."""
        return ShardedExperts(own, bounds, self.collective, width)

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """See Ops: this rank's share of the columns of ``table`` [V, D]."""
        bounds = shares(table.shape[1], self.collective.size, TILE)
        first, end = self._share(bounds)
        own = super().embedding(table[:, first:end].contiguous()) if end > first else None
        return ShardedEmbedding(own, bounds, self.collective, self)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[EmbeddingLayer, DenseLayer]:
        """See Ops: ``table`` [V, D] is sharded along its columns for the embedding, its rows for the output layer."""
        return self.embedding(table), self.dense(table, bias)

    def attention(
        self, spec: AttentionSpec, inputs: Sequence[LinearLayer] = (), output: LinearLayer | None = None
    ) -> PagedAttention:
        """See Ops: the attention of this rank's heads."""
        local = self._local(spec)
        own = None if local is None else super().attention(local)
        local_inputs = bool(inputs) and all(layer.has_local_outputs for layer in inputs)
        local_outputs = output is not None and output.has_local_inputs
        return ShardedAttention(spec, local, own, self, local_inputs, local_outputs)

    def head_bounds(self, spec: AttentionSpec) -> list[int]:
        """Return [size + 1] first query head of each rank, and their number."""
        return head_shares(spec.num_heads, spec.num_kv_heads, self.collective.size)

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
        first, end = self._share(self.head_bounds(spec))
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
