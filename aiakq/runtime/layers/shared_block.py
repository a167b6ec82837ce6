"""Hybrid layers of Zamba: a transformer block that several layers share, before the recurrent layer of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.recurrent_types import HybridCache
from aiakq.kernels.types import AttentionContext, LayerCache, LinearInput
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.mlp import MLP
from aiakq.runtime.layers.recurrent import GatedRecurrence, HeadedStateSpace, HybridMixer


class StepEmbeddings:
    """The embeddings of the tokens of a step, which layers read after others have changed the hidden states."""

    def __init__(self, ops: Ops) -> None:
        self.kept = torch.empty(0)
        self._copy = ops.scaling()

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, hidden], of which a copy is kept for this step."""
        self.kept = self._copy(x, out=torch.empty_like(x))
        return x


class LowRankSum(LinearLayer):
    """A shared linear layer plus the low-rank layers of one of its uses (Hu et al. 2021, arXiv:2106.09685).

    parts  pairs of a layer to the rank and a layer from it, whose concatenated outputs are added to those of ``base``.
    """

    def __init__(self, base: LinearLayer, parts: Sequence[tuple[LinearLayer, LinearLayer]], ops: Ops) -> None:
        self.base, self.parts, self._add = base, parts, ops.scaling()

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, K], a Tensor -> [T, N]."""
        out, start = self.base(x), 0
        for down, up in self.parts:
            low_rank = up(down(x))
            part = out[:, start : start + low_rank.shape[1]]
            self._add(low_rank, part, out=part)
            start += low_rank.shape[1]
        return out


@dataclass
class SharedBlock:
    """The parts of one use of a transformer block, of which only the adapters and ``output`` are its own.

    norm    norm of the concatenated hidden states and embeddings, 2 * hidden wide.
    output  linear layer behind the MLP.
    """

    norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    output: LinearLayer


class SharedBlockMixer(HybridMixer):
    """recurrent(norm(x + block(x, embeddings))).

    norm  norm before the recurrent layer.
    """

    def __init__(
        self,
        block: SharedBlock,
        norm: Norm,
        recurrent: GatedRecurrence | HeadedStateSpace,
        embeddings: StepEmbeddings,
        ops: Ops,
    ) -> None:
        super().__init__(block.attention, recurrent)
        self._recurrent, self._block, self._norm, self._embeddings, self._add = (
            recurrent,
            block,
            norm,
            embeddings,
            ops.scaling(),
        )

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; updates ``cache``, a HybridCache."""
        assert isinstance(x, Tensor) and isinstance(cache, HybridCache)
        block, width = self._block, x.shape[1]
        both = torch.empty(len(x), 2 * width, dtype=x.dtype, device=x.device)
        self._add(x, out=both[:, :width])
        self._add(self._embeddings.kept, out=both[:, width:])
        attended = block.attention(block.norm(both), positions, cache.paged, context)
        computed = block.output(block.mlp(block.mlp_norm(attended)))
        summed = self._add(computed, x, out=computed)
        return self._recurrent(self._norm(summed), positions, cache.states, context)


@dataclass
class SharedBlockLayer:
    """A layer (``DecoderLayer`` in models/decoder.py) of a mixer that normalizes its inputs itself, without an MLP.

    add  a Scaling by one, used for the residual sum.
    """

    attention: SharedBlockMixer
    add: Scaling
    mlp: None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        if residual is not None:
            x = self.add(x, residual, out=x)
        return x, self.attention(x, positions, cache, context)
