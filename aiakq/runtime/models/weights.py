"""Weights: where the builder of a model gets its tensors and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.kernels.types import QWeight
from aiakq.runtime.models.stage import Stage


class Weights(Protocol):
    """Source of the tensors and layers for a family's ``build``; see aiakq/runtime/loader/weights.py.

    stage  the layers to build; None for all.
    """

    stage: Stage | None

    @property
    def ops(self) -> Ops:
        """The operations of the device, from which layers without large weights are built."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def has_shape(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of this name and shape."""

    def is_packed(self, name: str) -> bool:
        """Whether the checkpoint holds the linear layer ``name`` quantized, under whatever names of tensors."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor [*shape] on the device, in ``dtype`` or the activation dtype if None.

        Raises ``tensor_mismatch`` for another shape.
        """

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """Return the weight [N, K] of the linear layer ``name``, dequantized if necessary.

        For families that do not use it as a linear layer, but multiply it with other weights or split it.
        """

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
        """Return the linear layer ``name`` with N outputs and K inputs, dense or quantized as in the checkpoint.

        rows  permutation [N] int64 for weights stored in another order: output i is row rows[i] of the stored weight.
        role  how tensor-parallel ranks split the layer.
        """

    def stacked(
        self, parts: Sequence[tuple[str, int]], k: int, *, bias: bool = False, role: Role = GATHERED
    ) -> LinearLayer:
        """Return linear layers (name, N) with the same K inputs, fused into one with outputs in the given order."""

    def dense(self, weight: Tensor, bias: Tensor | None = None, *, role: Role = GATHERED) -> LinearLayer:
        """Return a linear layer with a weight [N, K] that ``tensor`` returned."""

    def quantized(self, weights: Sequence[QWeight], role: Role) -> LinearLayer:
        """Return one layer of quantized weights [N_i, K] that a family made of what ``tensor`` returned."""

    def packed_experts(self, name: str) -> Iterator[QWeight] | None:
        """Yield the weights of experts [N, K] that a GGUF file holds in place of the tensor ``name``, gates before ups;
        None if that tensor holds floats.
        """

    def adaptable(
        self,
        layer: LinearLayer,
        name: str,
        n: int,
        k: int,
        weight: Callable[[], Tensor],
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """Return ``layer`` (from ``dense`` or ``embedding``) with support for LoRA adapters of the module ``name``.

        Returns ``layer`` itself if LoRA is disabled.

        weight  function that returns the layer's weight [N, K].
        bias    the layer's bias [N], or None.
        """

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """Return the embedding with the table ``name`` [V, D], and the output layer with ``bias`` [V] if it is tied."""
