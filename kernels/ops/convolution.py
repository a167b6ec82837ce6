"""Causal depthwise convolution with a state: interface, torch reference and implementations.

A token's result is bit-identical whether it was computed in a whole prompt, in a chunk, or beside other sequences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.recurrent_types import ConvolutionProblem, ConvolutionSpec, StateContext
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import AttentionContext


class Convolution(Protocol):
    """The convolution of one layer, computed in float32 and rounded once."""

    def __call__(
        self,
        x: Tensor,
        states: Tensor,
        context: AttentionContext,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, C] of the same dtype; padding rows become zeros. Reads and writes ``states`` [rows, K - 1, C]
        float32 as specified by ``context.states``.

        before, after  [T, C], elementwise factors of the inputs and of the outputs.
        """


class TorchConvolution:
    """The torch reference."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        self.taps = spec.weight.float().T.contiguous()
        self.bias = None if spec.bias is None else spec.bias.float()
        self.silu = spec.silu

    def __call__(
        self,
        x: Tensor,
        states: Tensor,
        context: AttentionContext,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, C]; see Convolution."""
        assert isinstance(context.states, StateContext)
        values = x.float() if before is None else x.float() * before.float()
        out = torch.zeros_like(values)
        starts = context.query_start_list
        for s, (source, saves) in enumerate(zip(context.states.sources, context.states.saves, strict=True)):
            first, end = starts[s], starts[s + 1]
            seen = torch.cat([states[source], values[first:end]])
            for token, row in saves:
                states[row] = seen[token + 1 : token + len(self.taps)]
            # One product and one sum at a time, so that one row and many rows give the same bits.
            y = seen[: end - first] * self.taps[0]
            for tap in range(1, len(self.taps)):
                y = y + seen[tap : tap + end - first] * self.taps[tap]
            out[first:end] = y
        if self.bias is not None:
            out = out + self.bias
        if self.silu:
            out = out * sigmoid(out)
        if after is not None:
            out = out * after.float()
        out[starts[-1] :] = 0
        return out.to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [...] float32, computed as a softmax over (x, 0).

    On a CPU torch handles the tail of a tensor that does not fill a vector register with different code, so the result
    of ``torch.sigmoid`` for an element depends on the size of the tensor. Softmax works row by row.
    """
    return torch.softmax(F.pad(x.unsqueeze(-1), (0, 1)), dim=-1)[..., 0]


class ConvolutionKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, spec: ConvolutionSpec, problem: ConvolutionProblem) -> Convolution:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[ConvolutionKernel].of_backends("convolution", "cpu", "triton")


def prepare(spec: ConvolutionSpec, problem: ConvolutionProblem) -> TorchConvolution:
    """Return the reference for one layer."""
    return TorchConvolution(spec)
