"""Attention of encoders: every token reads the whole text, or a window around it, in one step and without a KV cache.

It is computed by torch, text by text, so that a text gives the same bits whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, AttentionContext, LinearInput, RotaryTables
from aiakq.runtime.layers.attention import LayerCache

#: Queries of a window, or with a bias, that are computed together; a group of a window reads the keys around it only.
_QUERIES = 256
#: Bias of the scores of queries ``start`` .. ``end`` - 1 of a text of T tokens: start, end, T -> [H, end - start, T].
PositionBias = Callable[[int, int, int], Tensor]


class EncoderAttention:
    """Self-attention over whole texts.

    qkv     fused projection to queries, keys and values, H * D outputs each.
    output  output projection from H * D.
    rotary  tables of the rotary embedding, or None.
    window  tokens on each side that a token reads, besides itself; None: all.
    bias    bias of the scores (MPNet, JinaBERT), or None.
    norms   norms of all heads' queries and keys, H * D values of a token, or None.
    num_keys  first row of a text in the step -> number of its tokens that are read, for texts with others behind them.
    """

    norms: tuple[Norm, Norm] | None = None
    num_keys: Mapping[int, int] = {}

    def __init__(
        self,
        qkv: LinearLayer,
        output: LinearLayer,
        num_heads: int,
        head_dim: int,
        rotary: RotaryTables | None = None,
        window: int | None = None,
        bias: PositionBias | None = None,
    ) -> None:
        self.qkv, self.output = qkv, output
        self._heads, self._head_dim, self._scale = num_heads, head_dim, head_dim**-0.5
        self._rotary, self._window, self._bias = rotary, window, bias

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""
        return self.qkv.input_layout(m)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64, from 0 in each text -> [T, hidden]; there is no cache."""
        qkv = self.qkv(x)
        parts = qkv.view(len(qkv), 3, self._heads, self._head_dim)
        queries, keys, values = parts.unbind(1)
        if self.norms is not None:
            queries, keys = (_normed(part, norm) for part, norm in zip((queries, keys), self.norms, strict=True))
        if self._rotary is not None:
            queries, keys = (rotated(part, positions, self._rotary) for part in (queries, keys))
        out = torch.zeros(len(qkv), self._heads * self._head_dim, dtype=qkv.dtype, device=qkv.device)
        for start, end in pairwise(context.query_start_list):
            # Copies, so that neither strides nor addresses depend on the other texts.
            last = start + self.num_keys.get(start, end - start)
            rows = ((queries, end), (keys, last), (values, last))
            q, k, v = (part[start:stop].transpose(0, 1).contiguous() for part, stop in rows)
            out[start:end] = self._attend(q, k, v).transpose(0, 1).reshape(end - start, -1)
        return self.output(out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one text: queries [H, T, D], keys and values [H, K, D] of its first K tokens -> [H, T, D]."""
        length, window = q.shape[1], self._window
        if self._bias is not None:
            return self._biased(q, k, v, self._bias)
        if window is None or length <= window + 1:
            return scaled_dot_product_attention(q[None], k[None], v[None], scale=self._scale)[0]
        at, pieces = torch.arange(length, device=q.device), []
        for start in range(0, length, _QUERIES):
            end, first = min(start + _QUERIES, length), max(start - window, 0)
            last = min(end + window, k.shape[1])
            near = (at[start:end, None] - at[None, first:last]).abs() <= window
            part = q[None, :, start:end], k[None, :, first:last], v[None, :, first:last]
            pieces.append(scaled_dot_product_attention(*part, near, scale=self._scale)[0])
        return torch.cat(pieces, 1)

    def _biased(self, q: Tensor, k: Tensor, v: Tensor, bias: PositionBias) -> Tensor:
        """Attention of one text with a bias, by groups of queries: the bias of long texts would need much memory."""
        length, pieces = q.shape[1], []
        for start in range(0, length, _QUERIES):
            end = min(start + _QUERIES, length)
            added = bias(start, end, length)[None, :, :, : k.shape[1]].to(q.dtype)
            pieces.append(
                scaled_dot_product_attention(q[None, :, start:end], k[None], v[None], added, scale=self._scale)[0]
            )
        return torch.cat(pieces, 1)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return 0, since nothing is cached."""
        return 0

    def state_bytes(self) -> int:
        """Return 0, since attention has no recurrent state."""
        return 0

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Return no tensors."""
        return ()


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """x [T, H, D] -> the norm of H * D values of each token, in the same shape."""
    normed = norm(x.flatten(1).contiguous())
    assert isinstance(normed, Tensor)
    return normed.view(x.shape)


def rotated(x: Tensor, positions: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate pairs of elements i and i + D / 2 of x [T, H, D] by the angles of positions [T] int64, in float32.

    Source: Su et al. 2021 (arXiv:2104.09864), with the halves of a head paired as in GPT-NeoX.
    """
    cosines, sines = (table[positions][:, None].float() for table in (tables.cosines, tables.sines))
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1).to(x.dtype)
