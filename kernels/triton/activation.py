"""Launcher of activation_kernel.py."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.triton.layouts import COLUMNS, TritonLayout, block_for, output_for, warps_for
from aiakq.kernels.types import ActivationLayout, ActivationProblem, LinearInput

#: Names in the order of activation_kernel.py.
FUNCTIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu", "sigmoid")


def supports(problem: ActivationProblem) -> str | None:
    """Return None, or why not."""
    if problem.function not in FUNCTIONS:
        return f"it has no {problem.function}"
    return triton.unsupported_dtype("activation", problem)


def prepare(problem: ActivationProblem) -> TritonActivation:
    """Return the function that ``problem`` names."""
    return TritonActivation(problem.function)


class TritonActivation:
    """Triton activation function: act(x), or act(gate) * up."""

    def __init__(self, function: str) -> None:
        self._number = FUNCTIONS.index(function)

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """Return act(x) for x [M, I], as a Tensor or in ``layout``."""
        return self._run(x, None, layout)

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """Return act(first half of the columns) * second half: x [M, 2 I] -> [M, I]."""
        gate, up = x.chunk(2, dim=-1)
        return self._run(gate, up, layout)

    def _run(self, x: Tensor, up: Tensor | None, layout: ActivationLayout | None) -> LinearInput:
        """Launch the kernel for x and up [M, I], whose rows may be strided."""
        from aiakq.kernels.triton.activation_kernel import gate_kernel

        m, d = x.shape
        whole_row = False
        if isinstance(layout, TritonLayout):
            whole_row = layout.whole_row
            if layout.permutes:
                # A program computes part of a row, so it cannot permute the columns.
                layout = None
        out = output_for(x, layout)
        other = x if up is None else up
        block = block_for(d) if whole_row else min(COLUMNS, block_for(d))
        if m:
            gate_kernel[(m, -(-d // block))](
                x, other, *out.pointers, x.stride(0), other.stride(0), d,
                D=d, BLOCK=block, ACTIVATION=self._number, UP=up is not None, **out.constants,
                num_warps=warps_for(block),
            )  # fmt: skip
        return out.activation
