"""The attention layer: projections around paged attention."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import ActivationLayout, AttentionContext, AttentionSpec, LinearInput
from aiakq.kernels.types import LayerCache as LayerCache


class Attention:
    """Grouped-query self-attention over the paged cache.

    qkv     queries, keys and values side by side: H * D, Hkv * D and Hkv * D outputs.
    output  from H * D.
    """

    def __init__(self, qkv: LinearLayer, output: LinearLayer, spec: AttentionSpec, ops: Ops) -> None:
        self.qkv, self.output = qkv, output
        self._spec, self._ops = spec, ops
        self._attention = ops.attention(spec)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """The layout in which M rows of the input are best; see LinearLayer."""
        return self.qkv.input_layout(m)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; writes this step's keys and values into ``cache``."""
        return self.output(self._attention(self.qkv(x), positions, cache, context))

    def new_cache(self, pages: int, page_size: int) -> LayerCache:
        """A cache for this layer, all zeros."""
        return self._ops.new_cache(self._spec, pages, page_size)
