"""Recurrent layers, which replace attention in layers that keep a state of fixed size per sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.batched import BatchedLinear
from aiakq.kernels.ops.gated_norm import GatedNorm
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.recurrent_types import ConvolutionSpec, HybridCache, RecurrenceSpec, SelectiveScanSpec, States
from aiakq.kernels.types import ActivationLayout, AttentionContext, LayerCache, LinearInput
from aiakq.runtime.layers.attention import Attention


class RecurrentLayer:
    """Base class of recurrent layers: an input projection, and states instead of a KV cache.

    project  input projection.
    shapes   shapes of the states of one sequence.
    """

    def __init__(self, project: LinearLayer, shapes: Sequence[Sequence[int]], ops: Ops) -> None:
        self.project, self._shapes, self._ops = project, shapes, ops

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""
        return self.project.input_layout(m)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return 0 for any ``dtype``, since the layer stores nothing per token."""
        return 0

    def state_bytes(self) -> int:
        """Return the bytes of the states of one sequence, which are float32."""
        return sum(4 * math.prod(shape) for shape in self._shapes)

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Allocate ``state_rows`` rows of states, filled with zeros; the number of pages does not matter."""
        return States.zeros(state_rows, self._shapes, self._ops.device)


class GatedConvolution(RecurrentLayer):
    """Gated short convolution (LFM2): output(c * convolution(b * x)), with b, c and x projected from the input.

    project  fused projection to b, c and x.
    """

    def __init__(self, project: LinearLayer, spec: ConvolutionSpec, output: LinearLayer, ops: Ops) -> None:
        super().__init__(project, [spec.state_shape], ops)
        self.output, self._convolution = output, ops.convolution(spec)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        b, c, values = self.project(x).chunk(3, dim=-1)
        return self.output(self._convolution(values, cache[0], context, before=b, after=c))


class GatedRecurrence(RecurrentLayer):
    """A convolution, a linear recurrence and a gated norm (Mamba 2, Qwen3-Next).

    project  fused projection to the inputs of the recurrence and the gate of the norm, followed by the gates of the
             recurrence if ``gates`` is None.
    gates    separate projection to the gates of the recurrence, or None.
    scales   factors of the gate of the norm and of the gates of the recurrence.
    """

    def __init__(
        self,
        project: LinearLayer,
        gates: LinearLayer | None,
        convolution: ConvolutionSpec,
        recurrence: RecurrenceSpec,
        norm: GatedNorm,
        output: LinearLayer,
        ops: Ops,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__(project, [convolution.state_shape, recurrence.state_shape], ops)
        self.gates, self.norm, self.output = gates, norm, output
        self._convolution, self._recurrence = ops.convolution(convolution), ops.recurrence(recurrence)
        self._widths = [recurrence.width, recurrence.num_heads * recurrence.value_dim]
        self._scales = [None if scale == 1 else ops.scaling(scale) for scale in scales]

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; None if two layers read the input."""
        return super().input_layout(m) if self.gates is None else None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        projected = self.project(x)
        mixed, gate, remaining = projected.tensor_split([self._widths[0], sum(self._widths)], dim=-1)
        gates = remaining if self.gates is None else self.gates(x)
        for scale, part in zip(self._scales, (gate, gates), strict=True):
            if scale is not None:
                scale(part, out=part)
        mixed = self._convolution(mixed, cache[0], context)
        return self.output(self.norm(self._recurrence(mixed, gates, cache[1], context), gate))


class KimiDeltaAttention(RecurrentLayer):
    """A convolution, the delta rule with steps of key elements, and a gated norm; both gates have low-rank projections
    (Kimi Linear).

    project        fused projection to queries, keys and values, and to the inputs of ``steps`` and ``gate``.
    strengths      projection to the inputs of b.
    steps          projection to the inputs of the steps.
    gate           projection to the gate of the norm.
    """

    def __init__(
        self,
        project: LinearLayer,
        strengths: LinearLayer,
        steps: LinearLayer,
        gate: LinearLayer,
        convolution: ConvolutionSpec,
        recurrence: RecurrenceSpec,
        norm: GatedNorm,
        output: LinearLayer,
        ops: Ops,
    ) -> None:
        super().__init__(project, [convolution.state_shape, recurrence.state_shape], ops)
        self.strengths, self.steps, self.gate, self.norm, self.output = strengths, steps, gate, norm, output
        self._convolution, self._recurrence = ops.convolution(convolution), ops.recurrence(recurrence)
        self._copy, self._spec = ops.scaling(), recurrence

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since two layers read the input."""
        return None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        projected, spec = self.project(x), self._spec
        rank = (projected.shape[1] - spec.width) // 2
        mixed, steps, gate = projected.split([spec.width, rank, rank], dim=1)
        gates = torch.empty(len(projected), spec.gates_width, dtype=projected.dtype, device=projected.device)
        self._copy(self.strengths(x), out=gates[:, : spec.num_heads])
        self._copy(self.steps(steps), out=gates[:, spec.num_heads :])
        mixed = self._convolution(mixed, cache[0], context)
        return self.output(self.norm(self._recurrence(mixed, gates, cache[1], context), self.gate(gate)))


class LightningAttention(RecurrentLayer):
    """Linear attention with a constant decay per head, and a gated norm (MiniMax-01).

    project     fused projection to values, keys and queries, each followed by silu.
    gate        projection to the gate of the norm.
    recurrence  a state space whose steps are all 1, by its ``step_limits``.
    """

    def __init__(
        self,
        project: LinearLayer,
        gate: LinearLayer,
        recurrence: RecurrenceSpec,
        norm: GatedNorm,
        output: LinearLayer,
        ops: Ops,
    ) -> None:
        assert recurrence.step_limits == (1, 1), "constant steps"
        super().__init__(project, [recurrence.state_shape], ops)
        self.gate, self.norm, self.output, self._silu = gate, norm, output, ops.activation("silu")
        self._recurrence, self._steps = ops.recurrence(recurrence), recurrence.gates_width

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since two layers read the input."""
        return None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        mixed = _plain(self._silu(self.project(x)))
        # Any columns stand for the inputs of steps, which are clamped to 1.
        mixed = self._recurrence(mixed, mixed[:, : self._steps], cache[0], context)
        return self.output(self.norm(mixed, self.gate(x)))


class SelectiveStateSpace(RecurrentLayer):
    """A convolution and a selective scan, whose steps, keys and queries are projected from the convolution (Mamba).

    project     fused projection to the values and the gate of the output.
    parameters  projection of the convolved values to low-rank steps, keys and queries.
    steps       projection of low-rank steps to a step per channel, without its bias.
    norms       norms of low-rank steps, keys and queries, or None.
    """

    norms: tuple[Norm, Norm, Norm] | None = None

    def __init__(
        self,
        project: LinearLayer,
        convolution: ConvolutionSpec,
        parameters: LinearLayer,
        steps: LinearLayer,
        scan: SelectiveScanSpec,
        output: LinearLayer,
        ops: Ops,
    ) -> None:
        super().__init__(project, [convolution.state_shape, scan.state_shape], ops)
        self.parameters, self.steps, self.output = parameters, steps, output
        self._convolution, self._scan = ops.convolution(convolution), ops.selective_scan(scan)
        self._state_size = scan.state_shape[0]

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        values, gate = self.project(x).chunk(2, dim=-1)
        values = self._convolution(values, cache[0], context)
        parameters, size = self.parameters(values), self._state_size
        rank = parameters.shape[1] - 2 * size
        steps, keys, queries = parameters.tensor_split([rank, rank + size], dim=-1)
        if self.norms is not None:
            parts = zip(self.norms, (steps, keys, queries), strict=True)
            steps, keys, queries = (_plain(norm(part)) for norm, part in parts)
        return self.output(self._scan(values, self.steps(steps), keys, queries, gate, cache[1], context))


class HeadedStateSpace(RecurrentLayer):
    """A convolution, and selective scans of H parts of its channels, each with projections of its own (Zamba).

    project     fused projection to the values and the gates of all outputs.
    parameters  of each head's convolved values [T, H, C / H] to low-rank steps, keys and queries.
    steps       of each head's low-rank steps to a step per channel, without its bias.
    """

    def __init__(
        self,
        project: LinearLayer,
        convolution: ConvolutionSpec,
        parameters: BatchedLinear,
        steps: BatchedLinear,
        scans: Sequence[SelectiveScanSpec],
        rank: int,
        output: LinearLayer,
        ops: Ops,
    ) -> None:
        """rank: size of the low-rank steps."""
        super().__init__(project, [convolution.state_shape, *(scan.state_shape for scan in scans)], ops)
        self.parameters, self.steps, self.output, self._copy = parameters, steps, output, ops.scaling()
        self._convolution, self._scans = ops.convolution(convolution), [ops.selective_scan(scan) for scan in scans]
        self._rank, self._state_size = rank, scans[0].state_shape[0]

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates the states in ``cache``. The positions [T] are not used."""
        values, gate = self.project(x).chunk(2, dim=-1)
        values = self._convolution(values, cache[0], context)
        heads, rank, size = len(self._scans), self._rank, self._state_size
        by_head = values.unflatten(1, (heads, -1))
        parameters = values.new_empty(len(values), heads, rank + 2 * size)
        self.parameters(by_head, parameters)
        steps = torch.empty_like(by_head)
        self.steps(parameters[..., :rank], steps)
        out = torch.empty_like(values)
        gates, outs = gate.unflatten(1, (heads, -1)), out.unflatten(1, (heads, -1))
        for head, scan in enumerate(self._scans):
            keys, queries = parameters[:, head, rank : rank + size], parameters[:, head, rank + size :]
            part = scan(by_head[:, head], steps[:, head], keys, queries, gates[:, head], cache[1 + head], context)
            self._copy(part, out=outs[:, head])
        return self.output(out)


class SiluGate:
    """x * silu(gate), in place of a gated norm; the interface is GatedNorm in kernels/ops/gated_norm.py."""

    def __init__(self, ops: Ops) -> None:
        self._silu, self._copy = ops.activation("silu"), ops.scaling()

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [M, D] and gate [M, D] -> [M, D] of x's dtype."""
        width = x.shape[1]
        both = torch.empty(len(x), 2 * width, dtype=x.dtype, device=x.device)
        self._copy(gate, out=both[:, :width])
        self._copy(x, out=both[:, width:])
        return _plain(self._silu.gated(both))


def _plain(x: LinearInput) -> Tensor:
    """Narrow the type of a result that was computed without a requested layout."""
    assert isinstance(x, Tensor)
    return x


class HybridMixer:
    """Base class of layers with attention and a recurrent layer, whose cache has keys and values and states."""

    def __init__(self, attention: Attention, recurrent: RecurrentLayer) -> None:
        self.attention, self.recurrent = attention, recurrent

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since not only one layer reads the input."""
        return None

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in a cache of ``dtype``."""
        return self.attention.cache_bytes(dtype)

    def state_bytes(self) -> int:
        """Return the bytes of the states of one sequence."""
        return self.recurrent.state_bytes()

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Allocate the cache of attention and the states, filled with zeros."""
        return HybridCache.of(
            self.attention.new_cache(pages, page_size, state_rows),
            self.recurrent.new_cache(pages, page_size, state_rows),
        )


class ParallelMixers(HybridMixer):
    """Attention and a recurrent layer with the same input, whose outputs are added (Falcon-H1).

    before, after  factors of the inputs and of the outputs of attention and of the recurrent layer.
    """

    def __init__(
        self,
        attention: Attention,
        recurrent: GatedRecurrence,
        before: tuple[float, float],
        after: tuple[float, float],
        ops: Ops,
    ) -> None:
        super().__init__(attention, recurrent)
        self._recurrent = recurrent
        self._before: list[Scaling | None] = [None if scale == 1 else ops.scaling(scale) for scale in before]
        self._after = [ops.scaling(scale) for scale in after]

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; updates ``cache``, a HybridCache."""
        assert isinstance(x, Tensor) and isinstance(cache, HybridCache)
        inputs = [x if scale is None else scale(x) for scale in self._before]
        attended = self.attention(inputs[0], positions, cache.paged, context)
        mixed = self._recurrent(inputs[1], positions, cache.states, context)
        for_attention, for_recurrent = self._after
        return for_recurrent(mixed, for_attention(attended, out=attended), out=mixed)
