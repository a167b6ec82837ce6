"""The recurrent block of Griffin: a convolution and a real-gated linear recurrence (RG-LRU), beside a gate (De et al.
2024, arXiv:2402.19427).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.batched import BatchedLinear
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.recurrent_types import ConvolutionSpec, StateContext
from aiakq.kernels.types import AttentionContext, LayerCache, LinearInput
from aiakq.runtime.layers.recurrent import RecurrentLayer

#: Factor of the logarithm of the decay.
_DECAY = 8.0


class GatedLinearRecurrence(RecurrentLayer):
    """output(act(y) * RG-LRU(convolution(x))), with y and x projected from the input.

    For each channel, with an input v, gates i and r that are sigmoids of products with blocks of channels, and a state
    S, in float32 token by token,

        a = exp(-8 softplus(parameter) r)        S = a S + sqrt(1 - a^2) i v

    and without the root at position 0.

    project  fused projection to y and x.
    gates    product with blocks of the convolved x: for each block, the outputs of i, then those of r.
    """

    def __init__(
        self,
        project: LinearLayer,
        convolution: ConvolutionSpec,
        gates: BatchedLinear,
        gate_bias: Tensor,
        parameter: Tensor,
        act: Activation,
        output: LinearLayer,
        ops: Ops,
    ) -> None:
        """gate_bias [blocks, 2 * block] and parameter [C], both float32."""
        super().__init__(project, [convolution.state_shape, parameter.shape], ops)
        self.gates, self.output, self._act, self._sigmoid = gates, output, act, ops.activation("sigmoid")
        self._convolution, self._gate_bias = ops.convolution(convolution), gate_bias
        self._rate = -_DECAY * F.softplus(parameter)

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; updates the states in ``cache``."""
        gate, values = self.project(x).chunk(2, dim=-1)
        values = self._convolution(values, cache[0], context)
        both = torch.cat([gate, self._recurrence(values, positions, cache[1], context)], dim=1)
        return self.output(self._act.gated(both, self.output.input_layout(len(both))))

    def _recurrence(self, values: Tensor, positions: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """values [T, C] -> [T, C]; reads and writes ``states`` [rows, C] float32; padding rows become zeros."""
        blocks, width = len(self._gate_bias), self._gate_bias.shape[1] // 2
        products = values.new_empty(len(values), blocks, 2 * width)
        self.gates(values.unflatten(1, (blocks, width)), products)
        sigmoids = self._sigmoid((products.float() + self._gate_bias).flatten(1))
        assert isinstance(sigmoids, Tensor) and isinstance(context.states, StateContext)
        inputs, decays = (part.flatten(1) for part in sigmoids.unflatten(1, (blocks, 2, width)).unbind(2))
        out, starts, firsts = torch.zeros_like(values), context.query_start_list, (positions == 0).tolist()
        for s, (source, saves) in enumerate(zip(context.states.sources, context.states.saves, strict=True)):
            state, written = states[source], 0
            for token in range(starts[s + 1] - starts[s]):
                row = starts[s] + token
                # One whole token at a time: results of torch functions depend on the size of the tensor.
                exponent, value = self._rate * decays[row], values[row].float() * inputs[row]
                if not firsts[row]:
                    value = value * torch.sqrt(1 - torch.exp(2 * exponent))
                state = torch.exp(exponent) * state + value
                out[row] = state.to(out.dtype)
                while written < len(saves) and saves[written][0] == token:
                    states[saves[written][1]] = state
                    written += 1
        return out
