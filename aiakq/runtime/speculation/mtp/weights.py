"""LayerWeights: a checkpoint as the builder of its family sees it that builds a layer for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.kernels.types import QWeight
from aiakq.runtime.models.decoder import Weights
from aiakq.runtime.models.stage import Stage


@dataclass
class LayerWeights:
    """``Weights`` with other names of some modules, and layers of the target model in place of those of the checkpoint.

    inner      the checkpoint.
    stage      the layer.
    renamed    name of a module that is asked for -> that in the checkpoint.
    embedding  the target model's embedding and output layer; None: they are read.
    """

    inner: Weights
    stage: Stage | None
    renamed: Mapping[str, str]
    shared: tuple[EmbeddingLayer, LinearLayer] | None = None

    @property
    def ops(self) -> Ops:
        return self.inner.ops

    def name(self, name: str) -> str:
        """Return the checkpoint's name of the module or tensor ``name``."""
        for module, other in self.renamed.items():
            if name == module or name.startswith(f"{module}."):
                return other + name[len(module) :]
        return name

    def has(self, name: str) -> bool:
        return self.inner.has(self.name(name))

    def has_shape(self, name: str, *shape: int) -> bool:
        return self.inner.has_shape(self.name(name), *shape)

    def is_packed(self, name: str) -> bool:
        return self.inner.is_packed(self.name(name))

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """See Weights: [*shape]."""
        return self.inner.tensor(self.name(name), *shape, dtype=dtype)

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """See Weights: [N, K]."""
        return self.inner.weight(self.name(name), n, k)

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
        """See Weights: rows [N]."""
        if self.shared is not None and name == "lm_head":
            return self.shared[1]
        return self.inner.linear(self.name(name), n, k, bias=bias, rows=rows, role=role)

    def stacked(
        self, parts: Sequence[tuple[str, int]], k: int, *, bias: bool = False, role: Role = GATHERED
    ) -> LinearLayer:
        return self.inner.stacked([(self.name(name), n) for name, n in parts], k, bias=bias, role=role)

    def dense(self, weight: Tensor, bias: Tensor | None = None, *, role: Role = GATHERED) -> LinearLayer:
        """See Weights: weight [N, K], bias [N]."""
        return self.inner.dense(weight, bias, role=role)

    def quantized(self, weights: Sequence[QWeight], role: Role) -> LinearLayer:
        """See Weights: weights [N_i, K]."""
        return self.inner.quantized(weights, role)

    def packed_experts(self, name: str) -> Iterator[QWeight] | None:
        """See Weights: [N, K] of each expert."""
        return self.inner.packed_experts(self.name(name))

    def adaptable(
        self,
        layer: LinearLayer,
        name: str,
        n: int,
        k: int,
        weight: Callable[[], Tensor],
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """Return ``layer``: adapters are those of the target model. weight [N, K], bias [N]."""
        return layer

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """See Weights: table [V, D], bias [V]."""
        if self.shared is not None and name == "model.embed_tokens.weight":
            return self.shared
        return self.inner.embedding(self.name(name), vocab, width, tied=tied, bias=bias)
