"""The attention layer: projections, optional head norms, rotary positions, paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.cpu.attention import PagedAttention, Turning
from aiakq.kernels.ops.attention import is_native, paged_attention, write_kv
from aiakq.kernels.triton import attention as paged
from aiakq.kernels.triton.rows import Heads
from aiakq.kernels.types import AttentionContext, Rows, Wish
from aiakq.runtime.layers.linear import AnyLinear, wish_of
from aiakq.runtime.layers.norm import RMSNorm
from aiakq.runtime.layers.rotary import Angles, Rotary

#: Keys and values of one layer, each [pages, P, Hkv, D]; those of 8 bits are followed by their scales [pages, P, Hkv].
LayerCache = Sequence[Tensor]


@dataclass
class Attention:
    """Grouped-query self-attention over the paged cache.

    qkv             query, key and value side by side: H * D, Hkv * D and Hkv * D outputs.
    rotary          None for models with learned positions.
    q_norm, k_norm  per-head RMS norms (Qwen3), or None.
    """

    qkv: AnyLinear
    output: AnyLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    rotary: Rotary | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    _native: PagedAttention | None = field(default=None, init=False, repr=False)
    _heads: Heads | None = field(default=None, init=False, repr=False)

    def wish(self, m: int) -> Wish:
        """See ``wish_of``."""
        return wish_of(self.qkv, m)

    def __call__(self, x: Rows, angles: Angles | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes this step's keys and values into ``cache``."""
        qkv = self.qkv(x)
        if is_native(qkv, cache[0]):
            native = self._native or self._made()
            attended = native.fused(qkv, None if angles is None else angles.positions, cache, context)
        elif triton.usable(qkv):
            heads = self._heads or self._made_heads()
            query = heads(qkv, None if angles is None else angles.positions, cache, context.slots)
            attended = paged.attend(query, cache, context, self.scale, self.sliding_window).flatten(1)
        else:
            attended = self._by_torch(qkv, angles, cache, context)
        return self.output(attended)

    def _made(self) -> PagedAttention:
        """The native operations of this layer, made when they are first needed."""
        rotary, norm = self.rotary, self.q_norm
        self._native = PagedAttention(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            self.sliding_window,
            None if rotary is None else Turning(rotary.cosines, rotary.sines),
            None if norm is None else norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if norm is None else norm.eps,
        )
        return self._native

    def _made_heads(self) -> Heads:
        """The same for a GPU, as far as it comes before attention."""
        rotary, norm, k_norm = self.rotary, self.q_norm, self.k_norm
        self._heads = Heads(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            None if rotary is None else rotary.cosines,
            None if rotary is None else rotary.sines,
            None if norm is None else norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if norm is None else norm.eps,
        )
        return self._heads

    def _by_torch(self, qkv: Tensor, angles: Angles | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        H, Hkv, D = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = (part.unflatten(1, (-1, D)) for part in qkv.split((H * D, Hkv * D, Hkv * D), dim=1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            assert angles is not None
            q, k = self.rotary(q, angles), self.rotary(k, angles)
        write_kv(k, v, cache, context.slots)
        return paged_attention(q, cache, context, self.scale, self.sliding_window).flatten(1)
