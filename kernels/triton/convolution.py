"""Launcher of convolution_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.recurrent_types import ConvolutionProblem, ConvolutionSpec
from aiakq.kernels.triton.states import TOKENS, state_tables
from aiakq.kernels.types import AttentionContext

#: Channels per program.
CHANNELS = 128


def supports(problem: ConvolutionProblem) -> str | None:
    """Return None, or why not."""
    return triton.unsupported_dtype("convolution", problem)


def prepare(spec: ConvolutionSpec, problem: ConvolutionProblem) -> TritonConvolution:
    """Prepare the convolution of one layer."""
    return TritonConvolution(spec)


class TritonConvolution:
    """Triton causal convolution; the interface is Convolution in ops/convolution.py."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        self.weight = spec.weight.float().T.contiguous()
        self.bias = None if spec.bias is None else spec.bias.float().contiguous()
        self.silu = spec.silu

    def __call__(
        self,
        x: Tensor,
        states: Tensor,
        context: AttentionContext,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, C]; rows of x, before and after may be strided. See Convolution."""
        from aiakq.kernels.triton.convolution_kernel import convolution_kernel

        tables = state_tables(context, x.device)
        taps, channels = self.weight.shape
        assert states.shape[1:] == (taps - 1, channels) and states.is_contiguous(), "the states of this layer"
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        y[context.query_start_list[-1] :] = 0
        first, last = (x if factor is None else factor for factor in (before, after))
        programs = len(tables.blocks) + len(tables.saves)
        convolution_kernel[(programs, -(-channels // CHANNELS))](
            x, first, last, self.weight, self.weight if self.bias is None else self.bias, states, tables.sources,
            context.query_start, tables.blocks, tables.saves, y, x.stride(0), first.stride(0), last.stride(0),
            len(tables.blocks), C=channels, TAPS=taps, TOKENS=TOKENS, BLOCK=CHANNELS, BIAS=self.bias is not None,
            SILU=self.silu, BEFORE=before is not None, AFTER=after is not None, num_warps=4,
        )  # fmt: skip
        return y
