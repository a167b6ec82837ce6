"""LinearBuilder: builds the linear layers of a model from loaded or random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.kernels.types import QWeight
from aiakq.kernels.word_weight import WordWeight
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.lora.layers import AdaptableLayers
from aiakq.runtime.models.stage import Stage

#: Name of a layer, and its number of outputs.
Part = tuple[str, int]


class LinearBuilder:
    """The part of ``Weights`` that does not depend on the source of the tensors: layers built with ``ops``.

    stage     the layers to build; None for all.
    adapters  layers that support LoRA adapters; None if LoRA is disabled.
    """

    stage: Stage | None = None
    adapters: AdaptableLayers | None = None

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    @property
    def ops(self) -> Ops:
        """See Weights."""
        return self._ops

    def adaptable(
        self,
        layer: LinearLayer,
        name: str,
        n: int,
        k: int,
        weight: Callable[[], Tensor],
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """See Weights: weight [N, K], bias [N]."""
        if self.adapters is None:
            return layer
        return self.adapters.adapted(self._ops, layer, [(name, n)], k, bias, None, lambda *_: weight())

    def _adapted(
        self, layer: LinearLayer, parts: Sequence[Part], k: int, has_bias: bool, rows: Tensor | None = None
    ) -> LinearLayer:
        """Return ``layer``, into which the linear layers ``parts`` are fused, with support for LoRA adapters."""
        if self.adapters is None:
            return layer
        bias = joined_rows([self._bias(name, n) for name, n in parts]) if has_bias else None
        bias = bias if bias is None or rows is None else bias[rows]
        return self.adapters.adapted(self._ops, layer, parts, k, bias, rows, lambda name, n: self.weight(name, n, k))

    def linear(
        self,
        name: str,
        n: int,
        k: int,
        *,
        bias: bool = False,
        rows: Tensor | None = None,
        role: Role = GATHERED,
    ) -> LinearLayer:
        """Return a layer [N, K]; ``rows`` [N] int64 gives the stored row of each output."""
        return self._adapted(self._read([(name, n)], k, bias, role, rows), [(name, n)], k, bias, rows)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False, role: Role = GATHERED) -> LinearLayer:
        """See Weights."""
        return self._adapted(self._read(parts, k, bias, role), parts, k, bias)

    def _read(self, parts: Sequence[Part], k: int, bias: bool, role: Role, rows: Tensor | None = None) -> LinearLayer:
        """Return the fused layers ``parts``; ``rows`` [N] as in ``linear``, for one part."""
        raise NotImplementedError

    def _separate(self, parts: Sequence[Part], k: int, bias: bool, role: Role) -> LinearLayer:
        """Return the layers ``parts``, which cannot be fused, with concatenated outputs."""
        roles = role.of_parts(len(parts))
        return ConcatLinear([self._read([part], k, bias, own) for part, own in zip(parts, roles, strict=True)])

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """[N, K]; see Weights."""
        raise NotImplementedError

    def packed_experts(self, name: str) -> Iterator[QWeight] | None:
        """See Weights."""
        return None

    def _bias(self, name: str, n: int) -> Tensor:
        """Return the bias [N] of a linear layer."""
        raise NotImplementedError

    def dense(
        self, weight: Tensor, bias: Tensor | None = None, count: int = 1, *, role: Role = GATHERED
    ) -> LinearLayer:
        """Return a layer with a float weight [N, K], into which ``count`` layers of the checkpoint are fused."""
        return self._ops.dense(weight, bias, count, role)

    def quantized(self, weights: Sequence[QWeight], role: Role) -> LinearLayer:
        """Return one layer of quantized weights with the same K inputs, with outputs in the given order."""
        whole = concatenate(weights)
        if whole is not None:
            return self._ops.linear(whole, len(weights), role)
        roles = role.of_parts(len(weights))
        return ConcatLinear([self._ops.linear(weight, 1, part) for weight, part in zip(weights, roles, strict=True)])

    def embedding_of(
        self, table: Tensor, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """Return the embedding with a table [V, D], and the output layer with ``bias`` [V] if it is tied; both then
        share the weight.
        """
        return self._ops.tied_embedding(table, bias) if tied else (self._ops.embedding(table), None)


def same_scheme(weight: QWeight, other: QWeight) -> bool:
    """Whether two weights can be concatenated: all but codes, scales, zero points and biases are equal."""
    names = ("perm", "input_scale", "table", "factors")
    pairs = [(getattr(weight, name), getattr(other, name)) for name in names]
    return (
        (weight.scheme, weight.code_type, weight.k, weight.group_size, weight.rotated, weight.rounding)
        == (other.scheme, other.code_type, other.k, other.group_size, other.rotated, other.rounding)
        and weight.rounded == other.rounded
        and weight.scales.dtype == other.scales.dtype
        and (weight.zeros is None) == (other.zeros is None)
        and (weight.zeros is None or other.zeros is None or weight.zeros.dtype == other.zeros.dtype)
        and (weight.offsets is None) == (other.offsets is None)
        and (weight.bias is None) == (other.bias is None)
        and all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)
    )


def concatenate(weights: Sequence[QWeight]) -> QWeight | None:
    """Concatenate weights [N_i, K] to one [sum of N_i, K]; return None if their schemes differ."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, BlockWeight):
        return first.followed_by(weights[1:])
    if not all(same_scheme(weight, first) for weight in weights):
        return None
    if isinstance(first, WordWeight) and (whole := first.followed_by(weights[1:])) is not None:
        return whole
    weights = [weight.unpacked for weight in weights]

    def joined(name: str) -> Tensor | None:
        return None if getattr(first, name) is None else torch.cat([getattr(weight, name) for weight in weights])

    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=joined("zeros"),
        offsets=joined("offsets"),
        bias=joined("bias"),
    )


def joined_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [N_i, ...] to [sum of N_i, ...]."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
