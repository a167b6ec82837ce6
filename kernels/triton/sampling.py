"""Sampling on GPUs: the reference in torch, whose masks sampling_kernel.py applies."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler
from aiakq.kernels.types import SamplingProblem

#: Words of a mask, of 32 tokens each, that a program applies.
WORDS = 32


def supports(problem: SamplingProblem) -> str | None:
    """None, or why not."""
    if problem.dtype != torch.float32:
        return f"logits are float32, not {problem.dtype}"
    return triton.other_device(problem.device) or triton.unavailable_reason("sampling")


def prepare(problem: SamplingProblem) -> TritonSampler:
    """A sampler, which has no state."""
    return TritonSampler(CANDIDATES)


class TritonSampler(TorchSampler):
    """TorchSampler, which reads and writes no logits that a mask allows."""

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set what ``bits`` [N, W] int32 do not allow in rows ``rows`` [N] int64 of ``logits`` [R, V] to -inf."""
        from aiakq.kernels.triton.sampling_kernel import mask_kernel

        vocab = logits.shape[1]
        if len(rows):
            mask_kernel[(len(rows), -(-vocab // (32 * WORDS)))](
                logits, rows, bits, logits.stride(0), bits.stride(0), vocab, WORDS=WORDS, num_warps=4
            )
