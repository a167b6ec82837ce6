"""Sampling on GPUs: the torch reference, whose masks and greedy rows are computed by sampling_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler
from aiakq.kernels.triton.attention_blocks import power_of_two
from aiakq.kernels.types import SamplingProblem

#: Words of a mask, of 32 tokens each, per program.
WORDS = 32
#: Tokens per program of greedy rows. It depends on nothing else, so that sums do not.
WIDTH = 4096


def supports(problem: SamplingProblem) -> str | None:
    """Return None, or why not."""
    if problem.dtype != torch.float32:
        return f"logits are float32, not {problem.dtype}"
    return triton.unavailable_reason("sampling")


def prepare(problem: SamplingProblem) -> TritonSampler:
    """Return a sampler, which is stateless."""
    return TritonSampler(CANDIDATES)


class TritonSampler(TorchSampler):
    """TorchSampler that reads logits once to find the most likely tokens, and only touches those of masked tokens when
    it applies a mask.
    """

    def greedy(self, raw: Tensor, logits: Tensor, has_ranks: bool) -> tuple[Tensor, Tensor, Tensor]:
        """See TorchSampler: raw and logits [R, V] float32 -> tokens [R], normalizers [R], [6 * R] float32."""
        from aiakq.kernels.triton.sampling_kernel import greedy_kernel, greedy_parts_kernel

        (R, vocab), same, device = raw.shape, logits is raw, raw.device
        parts = -(-vocab // WIDTH)
        values = torch.empty(R, parts, 3, device=device)
        best = torch.empty(R, parts, dtype=torch.int32, device=device)
        tokens = torch.empty(R, dtype=torch.int64, device=device)
        normalizers = torch.empty(R, device=device)
        packed = torch.empty(6 * R, device=device)
        if R:
            greedy_parts_kernel[(R, parts)](
                raw, logits, values, best, raw.stride(0), logits.stride(0), vocab, SAME=same, WIDTH=WIDTH, num_warps=4
            )
            greedy_kernel[(R,)](
                raw, values, best, tokens, normalizers, packed, raw.stride(0), parts,
                PARTS=power_of_two(parts), num_warps=1,
            )  # fmt: skip
        if has_ranks and not same:
            packed[5 * R :] = (raw > raw.gather(1, tokens.unsqueeze(1))).sum(dim=-1) + 1
        return tokens, normalizers, packed

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set tokens not allowed by ``bits`` [N, W] int32 to -inf in rows ``rows`` [N] int64 of ``logits`` [R, V]."""
        from aiakq.kernels.triton.sampling_kernel import mask_kernel

        vocab = logits.shape[1]
        if len(rows):
            mask_kernel[(len(rows), -(-vocab // (32 * WORDS)))](
                logits, rows, bits, logits.stride(0), bits.stride(0), vocab, WORDS=WORDS, num_warps=4
            )
