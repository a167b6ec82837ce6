"""Cross-attention: every token of a text reads all states of an encoder, such as those of its audio (Vaswani et al.
2017, arXiv:1706.03762, section 3.2.3).

The keys and values of an encoder's states are the same for all tokens of a text, and for all texts with these states,
so they are computed once and kept in the layout of the paged KV cache. Each token is a sequence of its own for the
attention operation, which then gives the same bits whatever else a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import ActivationLayout, AttentionContext, AttentionSpec, LinearInput
from aiakq.runtime.layers.attention import LayerCache

#: States in a page of keys and values.
_PAGE_SIZE = 16


class CrossAttention:
    """Attention over the states of an encoder.

    query, output  projections of the tokens, to and from H * D.
    key, value     projections of the states of the encoder, to H * D.
    """

    def __init__(
        self,
        query: LinearLayer,
        key: LinearLayer,
        value: LinearLayer,
        output: LinearLayer,
        spec: AttentionSpec,
        ops: Ops,
    ) -> None:
        self.query, self.key, self.value, self.output, self.spec = query, key, value, output, spec
        self._ops, self._attention = ops, ops.attention(spec, [query], output)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""
        return self.query.input_layout(m)

    def keys_values(self, states: Tensor) -> LayerCache:
        """Return the cached keys and values of states [E, hidden] of an encoder, from page 1 on."""
        spec, count = self.spec, len(states)
        cache = self._ops.new_cache(spec, 1 + -(-count // _PAGE_SIZE), _PAGE_SIZE)
        slots = torch.arange(_PAGE_SIZE, _PAGE_SIZE + count, device=states.device)
        keys, values = (each(states).unflatten(1, (spec.num_kv_heads, -1)) for each in (self.key, self.value))
        self._attention.write(keys, values, cache, slots)
        return cache

    def __call__(self, x: LinearInput, layer: int, read: Sequence[EncodedRows]) -> Tensor:
        """x [T, hidden] -> [T, hidden].

        layer  number of this layer in ``EncodedRows.caches``.
        read   which rows read which states; others read nothing.
        """
        query = self.query(x)
        attended = torch.zeros_like(query)
        for rows in read:
            part = query[rows.start : rows.end].unflatten(1, (self.spec.num_heads, -1))
            out = self._attention.attend(part, rows.caches[layer], rows.context)
            attended[rows.start : rows.end] = out.flatten(1)
        return self.output(attended)


@dataclass
class EncodedRows:
    """Rows ``start`` .. ``end`` - 1 of a step, which read the same states of an encoder.

    caches   their keys and values, one of each layer.
    context  of the attention operation: each row is a sequence that reads all of them.
    """

    start: int
    end: int
    caches: Sequence[LayerCache]
    context: AttentionContext

    @staticmethod
    def of(start: int, end: int, caches: Sequence[LayerCache], count: int) -> EncodedRows:
        """Create it for ``count`` states."""
        rows, device = end - start, caches[0][0].device
        pages = torch.arange(1, 1 + -(-count // _PAGE_SIZE), dtype=torch.int32, device=device)
        context = AttentionContext(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            kv_len=torch.full((rows,), count, dtype=torch.int32, device=device),
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            page_table=pages.expand(rows, -1).contiguous(),
            num_decodes=rows,
            query_start_list=list(range(rows + 1)),
            kv_len_list=[count] * rows,
        )
        return EncodedRows(start, end, caches, context)


@dataclass
class EncoderStates:
    """The layers of a decoder that read an encoder's states, and what the next step reads.

    num_states  states of an encoder.
    rows        filled in for every step.
    """

    num_states: int
    layers: list[CrossAttention] = field(default_factory=list)
    rows: Sequence[EncodedRows] = ()

    def keys_values(self, states: Tensor) -> list[LayerCache]:
        """Return the keys and values of states [E, hidden] of an encoder, of each layer."""
        return [layer.keys_values(states) for layer in self.layers]

    def attend(self, layer: int, x: LinearInput) -> Tensor:
        """Return the output of a layer for all rows of the step: x [T, hidden] -> [T, hidden]."""
        return self.layers[layer](x, layer, self.rows)
