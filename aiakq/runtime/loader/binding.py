"""LinearBuilder: makes the linear layers of a model from loaded or random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import QWeight
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.lora.layers import AdaptableLayers
from aiakq.runtime.models.stage import Stage

#: A layer's name, and how many outputs it has.
Part = tuple[str, int]


class LinearBuilder:
    """The part of ``Weights`` that does not depend on where tensors come from: layers bound to ``ops``.

    stage     the layers to build; None: all.
    adapters  of the layers; None: they have none.
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
        """``layer``, the linear layers ``parts`` side by side, with adapters if there may be any."""
        if self.adapters is None:
            return layer
        bias = joined_rows([self._bias(name, n) for name, n in parts]) if has_bias else None
        bias = bias if bias is None or rows is None else bias[rows]
        return self.adapters.adapted(self._ops, layer, parts, k, bias, rows, lambda name, n: self.weight(name, n, k))

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """[N, K]; see Weights."""
        raise NotImplementedError

    def _bias(self, name: str, n: int) -> Tensor:
        """The bias [N] of a linear layer."""
        raise NotImplementedError

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> LinearLayer:
        """A layer of a weight [N, K] in floats, which stands for ``count`` of the checkpoint's."""
        return self._ops.dense(weight, bias, count)

    def quantized(self, weights: Sequence[QWeight]) -> LinearLayer:
        """One layer of quantized weights with the same K inputs, outputs in the order given."""
        whole = concatenate(weights)
        if whole is not None:
            return self._ops.linear(whole, len(weights))
        return ConcatLinear([self._ops.linear(weight) for weight in weights])

    def embedding_of(self, table: Tensor, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """The embedding of a table [V, D], and the head if it is tied to it: then there is one copy of the weight."""
        return self._ops.tied_embedding(table) if tied else (self._ops.embedding(table), None)


def same_scheme(weight: QWeight, other: QWeight) -> bool:
    """Whether the rows of two weights can stand in one: all but codes, scales, zero points and biases are equal."""
    pairs = [(weight.perm, other.perm), (weight.input_scale, other.input_scale)]
    return (
        (weight.scheme, weight.k, weight.group_size) == (other.scheme, other.k, other.group_size)
        and weight.scales.dtype == other.scales.dtype
        and (weight.zeros is None) == (other.zeros is None)
        and (weight.zeros is None or other.zeros is None or weight.zeros.dtype == other.zeros.dtype)
        and (weight.bias is None) == (other.bias is None)
        and all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)
    )


def concatenate(weights: Sequence[QWeight]) -> QWeight | None:
    """Weights [N_i, K] as one [sum of N_i, K], in their order; None if they are not of the same scheme."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if not all(same_scheme(weight, first) for weight in weights):
        return None

    def joined(name: str) -> Tensor | None:
        return None if getattr(first, name) is None else torch.cat([getattr(weight, name) for weight in weights])

    return QWeight(
        scheme=first.scheme,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=joined("zeros"),
        perm=first.perm,
        bias=joined("bias"),
        group_size=first.group_size,
        input_scale=first.input_scale,
    )


def joined_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N_i, ...] one after the other: [sum of N_i, ...]."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
