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
from aiakq.kernels.ops.experts import GroupedExperts, PairExperts, Routed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import Column, ExpertRole, Replicated, Role, Row
from aiakq.kernels.ops.sharded import (
    TILE,
    DenseWeight,
    ShardedExperts,
    ShardedLinear,
    ShardedOps,
    shares,
)
from aiakq.kernels.ops.sharded import Collective as Collective
from aiakq.kernels.types import AttentionSpec, QWeight

FEW_HEADS = "there are fewer heads than ranks"
#: Largest K step of the Triton kernels (triton/linear.py): shards are multiples of it if they remain even.
STEP = 128
#: Smallest group size that results from splitting groups that straddle the inputs of two ranks.
SMALLEST_GROUP = 32


class SummedExperts(ShardedExperts):
    """ShardedExperts whose rows of experts on other ranks are zero until the all-reduce over each token's sum."""

    def _pairs(self, own: PairExperts, x: Tensor, routed: Routed) -> Tensor:
        return self.total(own.weighted_sums(own.outputs(x, routed, zeros=False), routed, own=True))

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

    def _shard(self, weight: QWeight | DenseWeight, count: int, role: Role) -> ShardedLinear:
        """See ShardedOps; column- and row-parallel layers are gathered where they cannot be split."""
        if isinstance(role, Row):
            return self._row_parallel(weight, count, role.heads)
        if isinstance(role, Column):
            rows = self._rows(role)
            if rows is None:
                return self._gathered(weight, count)
            return ShardedLinear(weight, self._own(weight.with_rows(rows), count, weight.n), local_outputs=True)
        if isinstance(role, Replicated | ExpertRole):
            return super()._shard(weight, count, role)
        self.notes["linear layers gathered"] += 1
        return self._gathered(weight, count)

    def _row_parallel(self, weight: QWeight | DenseWeight, count: int, heads: AttentionSpec | None) -> ShardedLinear:
        """Shard a layer along its inputs, by ``heads`` if these are its inputs, or gather it if that is impossible."""
        size = self.collective.size
        if heads is None:
            bounds = shares(weight.k, size, _multiple(weight, size))
            reason = "it is too narrow" if _has_empty(bounds) else _straddles(weight, bounds)
            self.notes["MLP" if reason is None else f"MLP gathered ({reason})"] += 1
        else:
            bounds = [bound * heads.value_dim for bound in self.head_bounds(heads)]
            reason = FEW_HEADS if _has_empty(bounds) else _straddles(weight, bounds)
            if weight.perm is not None:
                reason = reason or "its order of inputs crosses heads"
        if reason is not None:
            return self._gathered(weight, count, reason)
        first, end = self._share(bounds)
        # The layer before computes its outputs in the order in which this one stores its inputs.
        inputs = torch.arange(first, end) if weight.perm is None else weight.perm[first:end].cpu()
        own = weight.with_inputs(first, end)
        own = own if self.collective.rank == 0 else own.with_bias(None)
        return ShardedLinear(weight, self._own(own, count, weight.n), self.collective.sum, inputs)

    def _rows(self, role: Column) -> Tensor | None:
        """Return the outputs [M] int64 of a column-parallel layer that this rank computes; None if it is gathered."""
        if isinstance(role.reader, AttentionSpec):
            spec, local = role.reader, self._local(role.reader)
            bounds = self.head_bounds(spec)
            if local is None or _has_empty(bounds):
                return None
            first = bounds[self.collective.rank]
            kv_head = first * spec.num_kv_heads // spec.num_heads
            starts = (first * spec.head_dim, kv_head * spec.head_dim, kv_head * spec.value_dim)
            places = zip(spec.widths, starts, local.widths, strict=True)
            parts = {
                part: (width, torch.arange(start, start + count))
                for part, (width, start, count) in zip("qkv", places, strict=True)
            }
        else:
            reader = role.reader
            if not isinstance(reader, ShardedLinear) or reader.inputs is None:
                return None
            parts = dict.fromkeys(role.parts, (reader.k, reader.inputs))
        rows, offset = [], 0
        for part in role.parts:
            width, kept = parts[part]
            rows.append(kept + offset)
            offset += width
        return torch.cat(rows)

    def attention(
        self, spec: AttentionSpec, inputs: Sequence[LinearLayer] = (), output: LinearLayer | None = None
    ) -> PagedAttention:
        """See ShardedOps."""
        gathered = []
        if not inputs or not all(layer.has_local_outputs for layer in inputs):
            gathered.append("its projections")
        if output is None or not output.has_local_inputs:
            reason = output.reason if isinstance(output, ShardedLinear) else ""
            gathered.append("its output" + (f" ({reason})" if reason else ""))
        self.notes["attention" + (f", {' and '.join(gathered)} gathered" if gathered else "")] += 1
        return super().attention(spec, inputs, output)

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
        first, end = self._share(bounds)
        if _has_empty(bounds):
            return super().tied_embedding(table, bias)
        head = self.dense(table, bias)
        assert isinstance(head, ShardedLinear) and isinstance(head.own, DenseLayer)
        rows = head.own.embedding()
        own = super(ShardedOps, self).embedding(rows) if isinstance(rows, Tensor) else rows
        return VocabularyEmbedding(own, first, end - first, self.collective), head


def operations_of_rank(ops: Ops, collective: Collective) -> ShardedOps:
    """Return the operations of ``ops`` for one rank, of the class that ``ops.uniform`` calls for."""
    return (ShardedOps if ops.uniform else RowParallelOps)(ops, collective)


def _has_empty(bounds: Sequence[int]) -> bool:
    """Whether a rank has nothing of what is split at ``bounds``."""
    return any(first == end for first, end in zip(bounds, bounds[1:], strict=False))


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
    shared = weight.rounding.group if isinstance(weight, QWeight) else 0
    if shared and any(bound % shared for bound in bounds[:-1]):
        return f"its groups of {shared} inputs with one scale straddle shares"
    group = weight.group_size
    if group == 1 or group >= weight.k or math.gcd(group, *bounds[:-1]) == group:
        return None
    smallest = min(math.gcd(group, *pair) for pair in zip(bounds, bounds[1:], strict=False))
    return None if smallest >= SMALLEST_GROUP else f"its groups of {group} straddle shares"
