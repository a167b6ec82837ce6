"""Operations of one rank of a tensor-parallel group that uses all-reduce, as Megatron-LM does (Shoeybi et al. 2019,
arXiv:1909.08053): faster between GPUs than ShardedOps, but results depend on the number of ranks.

Of two consecutive linear layers the first is column-parallel (sharded along its outputs) and the second row-parallel
(sharded along its inputs), so that ranks communicate once, after the second: this covers the projections and output of
attention and both halves of an MLP. The all-reduce uses the dtype of the activations, to which kernels round their
products anyway. Layers that cannot be sharded in this way are gathered as in ShardedOps; small ones are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import PagedAttention
from aiakq.kernels.ops.dense import DenseLayer
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.experts import GroupedExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.sharded import (
    TILE,
    DenseWeight,
    ShardedLinear,
    ShardedOps,
    head_shares,
    shares,
)
from aiakq.kernels.ops.sharded import Collective as Collective
from aiakq.kernels.types import AttentionContext, AttentionSpec, LayerCache, QWeight

#: Layers with at most this many outputs (routers, gates) are replicated: communication would take longer.
FEW_OUTPUTS = 512
#: Largest K step of the Triton kernels (triton/linear.py): shards are multiples of it if they remain even.
STEP = 128
#: Smallest group size that results from splitting groups that straddle the inputs of two ranks.
SMALLEST_GROUP = 32


class HeadParallelAttention:
    """Attention over this rank's heads, whose input contains only those; the interface is PagedAttention.

    gather  whether to gather the outputs of all ranks.
    """

    def __init__(self, own: PagedAttention, bounds: Sequence[int], collective: Collective, gather: bool) -> None:
        """bounds: [size + 1] first column of each rank's output, and the total."""
        self._own, self._bounds, self._collective, self._gather = own, bounds, collective, gather

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """qkv [T, local columns] -> [T, local heads * value_dim], or [T, H * value_dim] if gathered."""
        local_out = self._own(qkv, positions, cache, context)
        return self._collective.gather(local_out, self._bounds) if self._gather else local_out

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Not supported on ranks: only models that run through transformers write key [T, Hkv, D] separately."""
        raise NotImplementedError

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Not supported on ranks, like ``write``: query [T, H, D]."""
        raise NotImplementedError


class SummedExperts(GroupedExperts):
    """Experts distributed over the ranks, each with all of its weights: rows of experts on other ranks are zero until
    the all-reduce over each token's sum.
    """

    def __init__(self, own: GroupedExperts | None, bounds: Sequence[int], collective: Collective, width: int) -> None:
        """See ShardedExperts."""
        self._own, self._bounds, self._collective, self._width = own, bounds, collective, width

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] and counts [E] -> [S, N]."""
        first, end = self._bounds[self._collective.rank :][:2]
        start, count = sum(counts[:first]), sum(counts[first:end])
        out = torch.zeros(len(x), self._width, dtype=x.dtype, device=x.device)
        if count:
            assert self._own is not None
            out[start : start + count] = self._own(x[start : start + count], counts[first:end])
        return out

    def total(self, sums: Tensor) -> Tensor:
        """sums [T, N]; see GroupedExperts."""
        return self._collective.sum(sums)


class VocabularyEmbedding:
    """Embedding whose rows are sharded over the ranks in the same way as the output layer tied to it.

    own  lookup in this rank's ``count`` rows, starting at ``first``.
    """

    def __init__(self, own: EmbeddingLayer, first: int, count: int, collective: Collective) -> None:
        self._own, self._first, self._count, self._collective = own, first, count, collective

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]. The all-reduce adds one value and zeros, which is exact."""
        index = ids - self._first
        rows = self._own(index.clamp(0, self._count - 1))
        others = (index < 0) | (index >= self._count)
        return self._collective.sum(rows.masked_fill(others.unsqueeze(1), 0))


class RowParallelOps(ShardedOps):
    """The operations of one rank over ``collective``, with row-parallel layers and all-reduce."""

    uniform = False

    def describe(self) -> str:
        """Return how layers are distributed, for the start-up table."""
        return "; ".join(["sums added up after", *self._noted()])

    def settle(self, layer: ShardedLinear) -> None:
        """Bind a layer that is not part of a pair: shard it, or replicate it if it is small."""
        if layer.is_bound:
            return
        if layer.n <= FEW_OUTPUTS:
            layer.repeat()
        else:
            self.notes["linear layers gathered"] += 1
            layer.cut()

    def pair(self, first: ShardedLinear, second: LinearLayer, parts: int) -> None:
        """Shard ``first`` along its outputs and ``second`` along its inputs; gather them where that is not possible."""
        reason = self._cut_mlp(first, second, parts)
        self.notes["MLP" if reason is None else f"MLP gathered ({reason})"] += 1

    def _cut_mlp(self, first: ShardedLinear, second: LinearLayer, parts: int) -> str | None:
        """Shard both layers of an MLP; return None, or the reason why they cannot be sharded."""
        if not isinstance(second, ShardedLinear):
            return "its parts are of several schemes"
        if first.is_bound or second.is_bound or first.n != parts * second.k:
            return "other layers read it too"
        weight, size = second.weight, self.collective.size
        bounds = shares(weight.k, size, _multiple(weight, size))
        if any(first == end for first, end in zip(bounds, bounds[1:], strict=False)):
            return "it is too narrow"
        if reason := _straddles(weight, bounds):
            return reason
        start, end = bounds[self.collective.rank :][:2]
        # The first layer computes its outputs in the order in which the second one stores its inputs.
        inputs = torch.arange(start, end) if weight.perm is None else weight.perm[start:end].cpu()
        first.keep_outputs(torch.cat([part * weight.k + inputs for part in range(parts)]))
        second.keep_inputs(start, end)
        self._uncut = [layer for layer in self._uncut if not layer.is_bound]
        return None

    def attention(
        self,
        spec: AttentionSpec,
        inputs: Sequence[tuple[LinearLayer, str]] = (),
        output: LinearLayer | None = None,
    ) -> PagedAttention:
        """Bind the attention of this rank's heads and shard its projections; see Ops."""
        bounds = head_shares(spec.num_heads, spec.num_kv_heads, self.collective.size)
        reason = self._not_by_heads(spec, bounds, inputs)
        if reason is not None:
            self.notes[f"attention gathered ({reason})"] += 1
            return super().attention(spec)
        self._keep_heads(spec, bounds, inputs)
        bounds = [bound * spec.value_dim for bound in bounds]
        reason = self._cut_output(output, bounds)
        self.notes["attention" if reason is None else f"attention, its output gathered ({reason})"] += 1
        self.finish()
        local = self._local(spec)
        assert local is not None
        attention = super(ShardedOps, self).attention(local)
        return HeadParallelAttention(attention, bounds, self.collective, gather=reason is not None)

    def _not_by_heads(
        self, spec: AttentionSpec, bounds: Sequence[int], inputs: Sequence[tuple[LinearLayer, str]]
    ) -> str | None:
        """Return why the projections cannot be sharded by heads, or None."""
        if not inputs:
            return "something reads all heads before it"
        if any(first == end for first, end in zip(bounds, bounds[1:], strict=False)):
            return "there are fewer heads than ranks"
        widths = dict(zip("qkv", spec.widths, strict=True))
        for layer, parts in inputs:
            if not isinstance(layer, ShardedLinear) or layer.is_bound:
                return "its projections are not one layer"
            if layer.n != sum(widths[part] for part in parts):
                return "its projections have other widths"
        return None

    def _keep_heads(
        self, spec: AttentionSpec, bounds: Sequence[int], inputs: Sequence[tuple[LinearLayer, str]]
    ) -> None:
        """Keep the outputs of the projections that belong to this rank's heads."""
        local = self._local(spec)
        assert local is not None
        first = bounds[self.collective.rank]
        kv_head = first * spec.num_kv_heads // spec.num_heads
        starts = (first * spec.head_dim, kv_head * spec.head_dim, kv_head * spec.value_dim)
        ranges = dict(zip("qkv", zip(spec.widths, starts, local.widths, strict=True), strict=True))
        for layer, parts in inputs:
            rows, offset = [], 0
            for part in parts:
                width, start, count = ranges[part]
                rows.append(torch.arange(offset + start, offset + start + count))
                offset += width
            assert isinstance(layer, ShardedLinear)
            layer.keep_outputs(torch.cat(rows))

    def _cut_output(self, output: LinearLayer | None, bounds: Sequence[int]) -> str | None:
        """Shard the output projection along its inputs; return None, or the reason why it cannot be sharded."""
        if not isinstance(output, ShardedLinear) or output.is_bound or output.k != bounds[-1]:
            return "it is not one layer"
        if output.weight.perm is not None:
            return "its order of inputs crosses heads"
        if reason := _straddles(output.weight, bounds):
            return reason
        output.keep_inputs(*bounds[self.collective.rank :][:2])
        return None

    def _local(self, spec: AttentionSpec) -> AttentionSpec | None:
        """See ShardedOps; work is partitioned among programs for these heads alone."""
        local = super()._local(spec)
        return None if local is None else replace(local, uncut_heads=(0, 0))

    def _experts(self, own: GroupedExperts | None, bounds: Sequence[int], width: int) -> GroupedExperts:
        """See SummedExperts."""
        self.notes["mixture"] += 1
        return SummedExperts(own, bounds, self.collective, width)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[EmbeddingLayer, DenseLayer]:
        """See Ops: the embedding and the output layer share the same rows of ``table`` [V, D]."""
        bounds = shares(len(table), self.collective.size, TILE)
        first, end = bounds[self.collective.rank :][:2]
        if len(table) <= FEW_OUTPUTS or bounds[-2] == bounds[-1]:
            return super().tied_embedding(table, bias)
        head = self.dense(table, bias)
        assert isinstance(head, ShardedLinear)
        self.settle(head)
        assert isinstance(head.own, DenseLayer)
        rows = head.own.embedding()
        own = super(ShardedOps, self).embedding(rows) if isinstance(rows, Tensor) else rows
        return VocabularyEmbedding(own, first, end - first, self.collective), head


def operations_of_rank(ops: Ops, collective: Collective) -> ShardedOps:
    """Return the operations of ``ops`` for one rank, of the class that ``ops.uniform`` calls for."""
    return (ShardedOps if ops.uniform else RowParallelOps)(ops, collective)


def _multiple(weight: QWeight | DenseWeight, size: int) -> int:
    """Return the multiple for shards of the inputs: whole groups and K steps of kernels if shards remain even."""
    for multiple in (math.lcm(weight.group_size, STEP), STEP, TILE):
        if weight.k % (multiple * size) == 0 or weight.k >= 8 * size * multiple:
            return multiple
    return TILE


def _straddles(weight: QWeight | DenseWeight, bounds: Sequence[int]) -> str | None:
    """Return why a weight cannot be sharded along its inputs at ``bounds``, or None."""
    if weight.rotated:
        return "its inputs are rotated together"
    group = weight.group_size
    if group == 1 or group >= weight.k or math.gcd(group, *bounds[:-1]) == group:
        return None
    smallest = min(math.gcd(group, *pair) for pair in zip(bounds, bounds[1:], strict=False))
    return None if smallest >= SMALLEST_GROUP else f"its groups of {group} straddle shares"
