"""Multi-head latent attention (MLA; DeepSeek-V2 2024, arXiv:2405.04434) over a cache of latents, without expanding it.

Keys and values of a token are products of one latent, which is what the cache holds, beside one rotated key for all
heads. The product with keys is absorbed: it is done to the queries instead, once per step, so that attention compares
them with latents; what it returns are sums of latents, which only then become values.

The two layers here stand before and after attention, in the places of the projections of ``Attention``.
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

    latent   of the latent of a token, which is kept for all heads.
    rotated  elements of queries and keys that are rotated; keys have the same ones in all heads.
    plain    elements of a head's queries and keys that are not.
    value    of a value head.
    """

    heads: int
    latent: int
    rotated: int
    plain: int
    value: int

    @property
    def cached(self) -> int:
        """Elements of a token in the cache: the rotated ones first, then the latent."""
        return self.rotated + self.latent

    @property
    def query(self) -> int:
        """Elements of a head's queries before absorption."""
        return self.plain + self.rotated

    @property
    def expanded(self) -> int:
        """Outputs of the layer that makes a head's keys and values of a latent."""
        return self.plain + self.value


@dataclass
class LowRankQueries:
    """second(norm(first(x))), of which ``LatentProjection`` does the first product."""

    norm: Norm
    second: LinearLayer

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, rank] -> [T, H * query]."""
        return self.second(self.norm(x, None, self.second.input_layout(len(x))))


@dataclass
class LatentProjection(LinearLayer):
    """Absorbed queries of all heads and the latent key of a token, side by side as attention takes them.

    first     to the queries, or to what ``queries`` makes them of, then to latent and shared key.
    norm      of the latent.
    absorbed  queries of a head times the product that makes its keys of latents: [H, latent, plain].
    queries   None where ``first`` gives the queries themselves.
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
        """x [T, hidden] -> [T, (H + 1) * cached]: each head's rotated elements first."""
        sizes, first = self.sizes, self.first(x)
        queries, latents, shared = first.split([first.shape[1] - sizes.cached, sizes.latent, sizes.rotated], dim=1)
        if self.queries is not None:
            queries = self.queries(queries)
        plain, rotated = queries.unflatten(1, (sizes.heads, -1)).split([sizes.plain, sizes.rotated], dim=2)
        out = torch.empty(len(first), sizes.heads + 1, sizes.cached, dtype=first.dtype, device=first.device)
        out[:, :-1, : sizes.rotated] = rotated
        self.absorbed(plain, out[:, :-1, sizes.rotated :])
        out[:, -1, : sizes.rotated] = shared
        out[:, -1, sizes.rotated :] = self.norm(latents)
        return out.flatten(1)


@dataclass
class LatentOutput(LinearLayer):
    """The values of what attention found in latents, and the output layer.

    expand  [H, value, latent].
    """

    expand: BatchedLinear
    output: LinearLayer
    heads: int

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, H * latent] -> [T, hidden]."""
        assert isinstance(x, Tensor)
        return self.output(self.expand(x.unflatten(1, (self.heads, -1))).flatten(1))
