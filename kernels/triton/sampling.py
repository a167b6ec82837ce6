"""Sampling on GPUs: the torch reference with masks applied by sampling_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler
from aiakq.kernels.types import SamplingProblem

#: Words of a mask, of 32 tokens each, per program.
WORDS = 32


def supports(problem: SamplingProblem) -> str | None:
    """Return None, or why not."""
    if problem.dtype != torch.float32:
        return f"logits are float32, not {problem.dtype}"
    return triton.unavailable_reason("sampling")


def prepare(problem: SamplingProblem) -> TritonSampler:
    """Return a sampler, which is stateless."""
    return TritonSampler(CANDIDATES)


class TritonSampler(TorchSampler):
    """TorchSampler that only touches the logits of masked tokens when it applies a mask."""

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set tokens not allowed by ``bits`` [N, W] int32 to -inf in rows ``rows`` [N] int64 of ``logits`` [R, V]."""
        from aiakq.kernels.triton.sampling_kernel import mask_kernel

        vocab = logits.shape[1]
        if len(rows):
            mask_kernel[(len(rows), -(-vocab // (32 * WORDS)))](
                logits, rows, bits, logits.stride(0), bits.stride(0), vocab, WORDS=WORDS, num_warps=4
            )
