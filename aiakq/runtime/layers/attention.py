"""The attention layer: projections, optional head norms, rotary positions, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aiakq.kernels.attention import paged_attention, write_kv
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.layers.linear import AnyLinear
from aiakq.runtime.layers.norm import RMSNorm
from aiakq.runtime.layers.rotary import Rotary

#: Keys and values of one layer, each [pages, P, Hkv, D].
LayerCache = tuple[Tensor, Tensor]


@dataclass
class Attention:
    """Grouped-query self-attention over the paged cache.

    rotary          None for models with learned positions.
    q_norm, k_norm  per-head RMS norms (Qwen3), or None.
    """

    query: AnyLinear
    key: AnyLinear
    value: AnyLinear
    output: AnyLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    rotary: Rotary | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, cache: LayerCache, context: AttentionContext
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes this step's keys and values into ``cache``."""
        q = self.query(x).view(-1, self.num_heads, self.head_dim)
        k = self.key(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.value(x).view(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            assert angles is not None
            q, k = self.rotary(q, angles), self.rotary(k, angles)
        write_kv(k, v, *cache, context.slots)
        attended = paged_attention(q, *cache, context, self.scale, self.sliding_window)
        return self.output(attended.flatten(1))
