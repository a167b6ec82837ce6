"""Launcher of norm_kernel.py."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.triton.layouts import block_for, output_for, warps_for
from aiakq.kernels.types import ActivationLayout, LinearInput, NormProblem


def supports(problem: NormProblem) -> str | None:
    """Return None, or why not."""
    return triton.unsupported_dtype("norm", problem)


def prepare(weight: Tensor, bias: Tensor | None, epsilon: float, problem: NormProblem) -> TritonNorm:
    """Prepare the norm; weight and bias [D] are in the dtype of the activations."""
    return TritonNorm(weight, bias, epsilon, centered=problem.kind == "layer")


class TritonNorm:
    """x / rms(x) * weight, or if ``centered`` (x - mean) / deviation * weight + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool) -> None:
        self.weight, self.bias, self.epsilon, self.centered = weight, bias, epsilon, centered

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """x [M, D] -> [M, D], as a Tensor or in ``layout``; ``residual`` is first added to x in place."""
        from aiakq.kernels.triton.norm_kernel import norm_kernel

        m, d = x.shape
        out = output_for(x, layout)
        added = x if residual is None else residual
        weight, bias = self.weight, self.bias
        block = block_for(d)
        if m:
            norm_kernel[(m,)](
                x, added, weight, weight if bias is None else bias, *out.pointers, x.stride(0), added.stride(0), d,
                self.epsilon, D=d, BLOCK=block, RESIDUAL=residual is not None, CENTERED=self.centered,
                BIAS=bias is not None, **out.constants, num_warps=warps_for(block),
            )  # fmt: skip
        return out.activation
