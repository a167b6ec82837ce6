"""Launcher of gated_norm_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.recurrent_types import GatedNormProblem
from aiakq.kernels.triton.layouts import block_for, warps_for


def supports(problem: GatedNormProblem) -> str | None:
    """Return None, or why not."""
    return triton.unsupported_dtype("gated norm", problem)


def prepare(weight: Tensor, epsilon: float, problem: GatedNormProblem) -> TritonGatedNorm:
    """Prepare the norm; weight [D] is kept as float32."""
    return TritonGatedNorm(weight, epsilon, problem)


class TritonGatedNorm:
    """Triton grouped RMS norm with a gate; the interface is GatedNorm in ops/gated_norm.py."""

    def __init__(self, weight: Tensor, epsilon: float, problem: GatedNormProblem) -> None:
        assert problem.size % problem.group == 0, "whole groups"
        self.weight, self.epsilon = weight.float().contiguous(), epsilon
        self.group, self.gate_first, self.sigmoid = problem.group, problem.gate_first, problem.sigmoid

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [M, D], whose rows may be strided -> [M, D]; see GatedNorm."""
        from aiakq.kernels.triton.gated_norm_kernel import gated_norm_kernel

        m, d = x.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = block_for(self.group)
        if m:
            gated_norm_kernel[(m, d // self.group)](
                x, gate, self.weight, y, x.stride(0), gate.stride(0), y.stride(0), self.epsilon,
                GROUP=self.group, BLOCK=block, GATE_FIRST=self.gate_first, SIGMOID=self.sigmoid,
                num_warps=warps_for(block),
            )  # fmt: skip
        return y
