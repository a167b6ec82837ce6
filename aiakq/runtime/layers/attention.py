"""Attention layer: QKV projection, rotary embedding, paged attention and output projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, AttentionContext, AttentionSpec, LinearInput
from aiakq.kernels.types import LayerCache as LayerCache


class ProjectionStep(Protocol):
    """A step between the QKV projection and attention, before the heads' norms and rotary embedding."""

    def __call__(self, qkv: Tensor, positions: Tensor) -> None:
        """Modify qkv [T, (H + 2 Hkv) D] in place; positions [T] int64."""


class ProjectionNorms:
    """Norms of parts of a projection: of all heads of a token together (OLMo 2), or of each head (Cohere).

    norms   of the columns from ``first`` on, one after the other.
    widths  number of columns of each norm.
    """

    def __init__(self, norms: Sequence[Norm], widths: Sequence[int], ops: Ops, first: int = 0) -> None:
        self._norms, self._widths, self._first, self._copy = norms, widths, first, ops.scaling()

    def __call__(self, qkv: Tensor, positions: Tensor) -> None:
        """See ProjectionStep: qkv [T, (H + 2 Hkv) D]."""
        start = self._first
        for norm, width in zip(self._norms, self._widths, strict=True):
            part = qkv[:, start : start + width]
            normed = norm(part)
            assert isinstance(normed, Tensor)
            self._copy(normed, out=part)
            start += width


class QueryScales:
    """Scales queries by a factor that depends on the position (Llama 4).

    factors  factor of each position, [positions] float32.
    width    number of columns of the queries.
    """

    def __init__(self, factors: Tensor, width: int, ops: Ops) -> None:
        self._scale, self._width = ops.scaling(factors=factors), width

    def __call__(self, qkv: Tensor, positions: Tensor) -> None:
        """See ProjectionStep: qkv [T, (H + 2 Hkv) D], positions [T]."""
        queries = qkv[:, : self._width]
        self._scale(queries, positions=positions, out=queries)


class ValueScale:
    """Multiplies values by a factor (MiMo-V2-Flash).

    width  number of columns of the values.
    """

    def __init__(self, factor: float, width: int, ops: Ops) -> None:
        self._scale, self._width = ops.scaling(factor), width

    def __call__(self, qkv: Tensor, positions: Tensor) -> None:
        """See ProjectionStep: qkv [T, H D + Hkv (D + value_dim)]."""
        values = qkv[:, qkv.shape[1] - self._width :]
        self._scale(values, out=values)


class KeysAsValues(LinearLayer):
    """Projection to queries, keys and values that are the keys (Gemma 4).

    first  projection to queries and keys, with the role GATHERED.
    keys   number of columns of the keys.
    """

    def __init__(self, first: LinearLayer, keys: int, ops: Ops) -> None:
        self._first, self._keys, self._copy = first, keys, ops.scaling()

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""
        return self._first.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden] -> [T, (H + 2 Hkv) D]."""
        first = self._first(x)
        width = first.shape[1]
        out = torch.empty(len(first), width + self._keys, dtype=first.dtype, device=first.device)
        self._copy(first, out=out[:, :width])
        self._copy(first[:, width - self._keys :], out=out[:, width:])
        return out


class Attention:
    """Grouped-query self-attention over the paged KV cache.

    qkv     fused QKV projection; its outputs are the concatenated queries, keys and values (``spec.widths``).
    output  output projection, from H * value_dim.
    before  steps between the QKV projection and attention, in order; if there are any, ``qkv`` has the role GATHERED.
    inputs  layers that compute the inputs of attention if it is not ``qkv`` alone; see Ops.attention.
    """

    def __init__(
        self,
        qkv: LinearLayer,
        output: LinearLayer,
        spec: AttentionSpec,
        ops: Ops,
        before: Sequence[ProjectionStep] = (),
        inputs: Sequence[LinearLayer] = (),
    ) -> None:
        self.qkv, self.output, self.before = qkv, output, before
        self.spec, self._ops = spec, ops
        self._attention = ops.attention(spec, inputs or [qkv], output)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""
        return self.qkv.input_layout(m)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; writes this step's keys and values into ``cache``."""
        return self.output(self._attended(x, positions, cache, context))

    def _attended(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        qkv = self.qkv(x)
        for step in self.before:
            step(qkv, positions)
        return self._attention(qkv, positions, cache, context)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in a cache of ``dtype``."""
        return self._ops.cache_bytes(self.spec, dtype)

    def state_bytes(self) -> int:
        """Return 0, since attention has no recurrent state."""
        return 0

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Allocate this layer's KV cache, filled with zeros; a layer that only reads has none of its own."""
        return () if self.spec.reads_only else self._ops.new_cache(self.spec, pages, page_size)


class HeadGatedAttention(Attention):
    """Attention whose heads are multiplied by the sigmoid of one gate each (LFM3).

    gate    projection to a gate per head.
    repeat  linear layer that repeats the gate of each head for all of its elements: H -> H * value_dim. As a layer, it
            is split over tensor-parallel ranks by heads, like ``qkv``.
    """

    def __init__(
        self,
        qkv: LinearLayer,
        gate: LinearLayer,
        repeat: LinearLayer,
        output: LinearLayer,
        spec: AttentionSpec,
        ops: Ops,
        before: Sequence[ProjectionStep] = (),
    ) -> None:
        super().__init__(qkv, output, spec, ops, before)
        self.gate, self.repeat, self._sigmoid, self._copy = gate, repeat, ops.activation("sigmoid"), ops.scaling()

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since two layers read the input."""
        return None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; writes this step's keys and values into ``cache``."""
        gates, attended = self.repeat(self.gate(x)), self._attended(x, positions, cache, context)
        width = gates.shape[1]
        gated = torch.empty(len(gates), 2 * width, dtype=gates.dtype, device=gates.device)
        self._copy(gates, out=gated[:, :width])
        self._copy(attended, out=gated[:, width:])
        return self.output(self._sigmoid.gated(gated, self.output.input_layout(len(gated))))


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate (Qwen3-Next).

    gate_query  fused projection to gate and queries, H * D outputs each.
    key_value   fused projection to keys and values.
    """

    def __init__(
        self, gate_query: LinearLayer, key_value: LinearLayer, output: LinearLayer, spec: AttentionSpec, ops: Ops
    ) -> None:
        super().__init__(gate_query, output, spec, ops, inputs=[gate_query, key_value])
        self.key_value, self._sigmoid, self._copy = key_value, ops.activation("sigmoid"), ops.scaling()

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since two layers read the input."""
        return None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; writes this step's keys and values into ``cache``."""
        gated, key_value = self.qkv(x), self.key_value(x)
        width = gated.shape[1] // 2
        behind_gate = gated[:, width:]
        qkv = torch.empty(len(gated), width + key_value.shape[1], dtype=gated.dtype, device=gated.device)
        self._copy(behind_gate, out=qkv[:, :width])
        self._copy(key_value, out=qkv[:, width:])
        self._copy(self._attention(qkv, positions, cache, context), out=behind_gate)
        return self.output(self._sigmoid.gated(gated, self.output.input_layout(len(gated))))
