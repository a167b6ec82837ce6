"""Selective scan (the recurrence of Mamba; Gu and Dao 2023, arXiv:2312.00752): interface, torch reference and
implementations.

For each token and channel, with a value v, a step d = softplus(a + step_bias), a gate z, a key k and a query q
[state_size] that all channels share, and a state S [state_size],

    S = S e^(-e^a_log d) + k (d v)        y = (q S + skip v) silu(z)

Everything is computed in float32 token by token, so that a token's result is bit-identical whether it was computed in
a whole prompt, in a chunk, or beside other sequences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.convolution import sigmoid
from aiakq.kernels.recurrent_types import SelectiveScanProblem, SelectiveScanSpec, StateContext
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import AttentionContext


class SelectiveScan(Protocol):
    """The selective scan of one layer, computed in float32 and rounded once."""

    def __call__(
        self,
        x: Tensor,
        steps: Tensor,
        keys: Tensor,
        queries: Tensor,
        gate: Tensor,
        states: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """x, steps and gate [T, C], keys and queries [T, state_size], all of one dtype -> [T, C] of the same dtype;
        padding rows become zeros. Reads and writes ``states`` [rows, state_size, C] float32 as specified by
        ``context.states``.
        """


class TorchSelectiveScan:
    """The torch reference."""

    def __init__(self, spec: SelectiveScanSpec) -> None:
        self.rate = -spec.a_log.float().exp().T.contiguous()
        self.step_bias, self.skip = spec.step_bias.float(), spec.skip.float()

    def __call__(
        self,
        x: Tensor,
        steps: Tensor,
        keys: Tensor,
        queries: Tensor,
        gate: Tensor,
        states: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """x, steps and gate [T, C], keys and queries [T, state_size] -> [T, C]; see SelectiveScan."""
        assert isinstance(context.states, StateContext)
        out = torch.zeros_like(x)
        starts = context.query_start_list
        for s, (source, saves) in enumerate(zip(context.states.sources, context.states.saves, strict=True)):
            state, written = states[source], 0
            for token in range(starts[s + 1] - starts[s]):
                row = starts[s] + token
                # One whole token at a time: results of torch functions depend on the size of the tensor.
                value, key, query = x[row].float(), keys[row].float(), queries[row].float()
                step = F.softplus(steps[row].float() + self.step_bias)
                state = state * torch.exp(self.rate * step) + key.unsqueeze(-1) * (step * value)
                y = (state * query.unsqueeze(-1)).sum(0) + self.skip * value
                factor = gate[row].float()
                out[row] = (y * (factor * sigmoid(factor))).to(x.dtype)
                while written < len(saves) and saves[written][0] == token:
                    states[saves[written][1]] = state
                    written += 1
        return out


class SelectiveScanKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, spec: SelectiveScanSpec, problem: SelectiveScanProblem) -> SelectiveScan:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[SelectiveScanKernel].of_backends("selective_scan", "cpu", "triton")


def prepare(spec: SelectiveScanSpec, problem: SelectiveScanProblem) -> TorchSelectiveScan:
    """Return the reference for one layer."""
    return TorchSelectiveScan(spec)
