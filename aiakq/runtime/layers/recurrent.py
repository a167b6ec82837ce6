"""Recurrent layers: what takes the place of attention in layers whose memory of a sequence is a state of fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.gated_norm import GatedNorm
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec, States
from aiakq.kernels.types import ActivationLayout, AttentionContext, LayerCache, LinearInput


class RecurrentLayer:
    """What all recurrent layers share: a projection, and states instead of keys and values.

    project  of the layer's input.
    shapes   of its states.
    """

    def __init__(self, project: LinearLayer, shapes: Sequence[Sequence[int]], ops: Ops) -> None:
        self.project, self._shapes, self._ops = project, shapes, ops

    def input_layout(self, m: int) -> ActivationLayout | None:
        """The layout in which M rows of the input are best; see LinearLayer."""
        return self.project.input_layout(m)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """0, whatever ``dtype`` keys and values have: its tokens leave nothing behind."""
        return 0

    def state_bytes(self) -> int:
        """Bytes of a sequence's state, which is in float32."""
        return sum(4 * math.prod(shape) for shape in self._shapes)

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """``state_rows`` states, all zeros; pages hold none of them."""
        return States.zeros(state_rows, self._shapes, self._ops.device)


class GatedConvolution(RecurrentLayer):
    """output(c * convolution(b * x)) with b, c and x projected from the input (LFM2).

    project  to b, c and x side by side.
    """

    def __init__(self, project: LinearLayer, spec: ConvolutionSpec, output: LinearLayer, ops: Ops) -> None:
        super().__init__(project, [spec.state_shape], ops)
        self.output, self._convolution = output, ops.convolution(spec)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden], whatever its positions [T]; updates the states in ``cache``."""
        b, c, values = self.project(x).chunk(3, dim=-1)
        return self.output(self._convolution(values, cache[0], context, before=b, after=c))


class GatedRecurrence(RecurrentLayer):
    """A convolution, a linear recurrence and a gated norm (Mamba 2, Qwen3-Next).

    project  to the recurrence's inputs and the norm's gate side by side, then its gates.
    gates    projects to the recurrence's gates; None: ``project`` does.
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
    ) -> None:
        super().__init__(project, [convolution.state_shape, recurrence.state_shape], ops)
        self.gates, self.norm, self.output = gates, norm, output
        self._convolution, self._recurrence = ops.convolution(convolution), ops.recurrence(recurrence)
        self._widths = [recurrence.width, recurrence.num_heads * recurrence.value_dim]

    def input_layout(self, m: int) -> ActivationLayout | None:
        """None where two layers read M rows of the input."""
        return super().input_layout(m) if self.gates is None else None

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden], whatever its positions [T]; updates the states in ``cache``."""
        projected = self.project(x)
        mixed, gate, own = projected.tensor_split([self._widths[0], sum(self._widths)], dim=-1)
        gates = own if self.gates is None else self.gates(x)
        mixed = self._convolution(mixed, cache[0], context)
        return self.output(self.norm(self._recurrence(mixed, gates, cache[1], context), gate))
