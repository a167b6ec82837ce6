"""Multi-head latent attention (MLA; DeepSeek-V2 2024, arXiv:2405.04434) with weight absorption.

The keys and values of a token are projections of one latent vector. The KV cache holds this latent and one rotated key
that all heads share. The key projection is absorbed into the queries, so that attention runs on the cached latents
directly; its output, weighted sums of latents, is then projected to values.

The two layers in this module take the places of the input and output projections of ``Attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.batched import BatchedLinear
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, LinearInput


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention.

    heads    number of heads.
    latent   size of a token's latent (kv_lora_rank).
    rotated  rotated elements of a head's queries, and of the key shared by all heads (qk_rope_head_dim).
    plain    elements of a head's queries and keys without rotary embedding (qk_nope_head_dim).
    value    size of a value head (v_head_dim).
    """

    heads: int
    latent: int
    rotated: int
    plain: int
    value: int

    @property
    def cached(self) -> int:
        """Elements per token in the KV cache: the rotated key, then the latent."""
        return self.rotated + self.latent

    @property
    def query(self) -> int:
        """Size of a query head before absorption."""
        return self.plain + self.rotated

    @property
    def expanded(self) -> int:
        """Outputs per head of the projection from latents to keys and values."""
        return self.plain + self.value


@dataclass
class LowRankQueries:
    """Low-rank query projection second(norm(first(x))), without ``first``, which ``LatentProjection`` computes."""

    norm: Norm
    second: LinearLayer

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, rank] -> [T, H * query]."""
        return self.second(self.norm(x, None, self.second.input_layout(len(x))))

    def normed(self, x: Tensor) -> Tensor:
        """Return the input of ``second``: x [T, rank] -> [T, rank]."""
        normed = self.norm(x)
        assert isinstance(normed, Tensor)
        return normed


@dataclass
class LatentProjection(LinearLayer):
    """Input projection of latent attention, to the absorbed queries of all heads and the cached key of a token.

    first     fused projection to the queries (or the input of ``queries``), the latent and the shared key.
    norm      norm of the latent.
    absorbed  per-head key projection, applied to the queries: [H, latent, plain].
    queries   second part of a low-rank query projection; None if ``first`` computes the queries.
    """

    first: LinearLayer
    norm: Norm
    absorbed: BatchedLinear
    sizes: LatentSizes
    queries: LowRankQueries | None = None

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See LinearLayer."""
        return self.first.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden] -> [T, (H + 1) * cached], with the rotated elements of each head first."""
        queries, latents, shared = self.projected(x)
        return self.joined(queries if self.queries is None else self.queries(queries), latents, shared)

    def projected(self, x: LinearInput) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> queries [T, H * query] (or the input of ``queries``), latents [T, latent] before their norm,
        and shared keys [T, rotated].
        """
        sizes, first = self.sizes, self.first(x)
        queries, latents, shared = first.split([first.shape[1] - sizes.cached, sizes.latent, sizes.rotated], dim=1)
        return queries, latents, shared

    def joined(self, queries: Tensor, latents: Tensor, shared: Tensor) -> Tensor:
        """Queries [T, H * query] and the other results of ``projected`` -> [T, (H + 1) * cached]."""
        sizes = self.sizes
        plain, rotated = queries.unflatten(1, (sizes.heads, -1)).split([sizes.plain, sizes.rotated], dim=2)
        shape = (len(queries), sizes.heads + 1, sizes.cached)
        out = torch.empty(shape, dtype=queries.dtype, device=queries.device)
        out[:, :-1, : sizes.rotated] = rotated
        self.absorbed(plain, out[:, :-1, sizes.rotated :])
        out[:, -1, : sizes.rotated] = shared
        normed = self.norm(latents)
        assert isinstance(normed, Tensor)
        out[:, -1, sizes.rotated :] = normed
        return out.flatten(1)


@dataclass
class LatentOutput(LinearLayer):
    """Output projection of latent attention: from weighted sums of latents to values, then to the hidden size.

    expand  per-head value projection [H, value, latent].
    """

    expand: BatchedLinear
    output: LinearLayer
    heads: int

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, H * latent] -> [T, hidden]."""
        assert isinstance(x, Tensor)
        return self.output(self.values(x))

    def values(self, x: Tensor) -> Tensor:
        """x [T, H * latent] -> [T, H * value]."""
        return self.expand(x.unflatten(1, (self.heads, -1))).flatten(1)
