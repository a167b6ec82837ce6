"""Launcher of recurrence_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.recurrence import EPSILON
from aiakq.kernels.recurrent_types import RecurrenceProblem, RecurrenceSpec
from aiakq.kernels.triton.layouts import block_for
from aiakq.kernels.triton.states import state_tables
from aiakq.kernels.types import AttentionContext

#: State elements that a program of one warp holds in registers.
HELD = 2048
#: Maximum key size, the length of a column: a program holds at least two columns.
MAX_KEY_SIZE = 1024


def supports(problem: RecurrenceProblem) -> str | None:
    """Return None, or why not."""
    reason = triton.unsupported_dtype("recurrence", problem)
    if reason is None and problem.key_dim > MAX_KEY_SIZE:
        reason = f"keys have at most {MAX_KEY_SIZE} elements"
    return reason


def prepare(spec: RecurrenceSpec, problem: RecurrenceProblem) -> TritonRecurrence:
    """Prepare the recurrence of one layer."""
    return TritonRecurrence(spec)


def columns(spec: RecurrenceSpec) -> int:
    """Return the number of state columns per program."""
    return min(block_for(spec.value_dim), HELD // block_for(spec.key_dim))


class TritonRecurrence:
    """Triton recurrence; the interface is Recurrence in ops/recurrence.py."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self.spec = spec
        self.rate = -spec.a_log.float().exp()
        self.step_bias = spec.step_bias.float().contiguous()
        self.skip = None if spec.skip is None else spec.skip.float().contiguous()

    def __call__(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """x [T, width] and gates [T, H or 2 H], whose rows may be strided -> [T, H * value_dim]."""
        from aiakq.kernels.triton.recurrence_kernel import recurrence_kernel

        spec, tables = self.spec, state_tables(context, x.device)
        assert states.shape[1:] == spec.state_shape and states.is_contiguous(), "the states of this layer"
        y = torch.empty(len(x), spec.num_heads * spec.value_dim, dtype=x.dtype, device=x.device)
        y[context.query_start_list[-1] :] = 0
        block = columns(spec)
        recurrence_kernel[(-(-spec.value_dim // block), spec.num_heads, len(tables.sources))](
            x, gates, self.rate, self.step_bias, self.rate if self.skip is None else self.skip, states,
            tables.sources, context.query_start, tables.firsts, tables.saves, y, x.stride(0), gates.stride(0),
            *spec.step_limits, spec.key_dim**-0.5, EPSILON,
            H=spec.num_heads, HK=spec.num_key_heads, DK=spec.key_dim, WIDTH=block_for(spec.key_dim), DV=spec.value_dim,
            BLOCK=block, DELTA=spec.kind == "delta_rule", SKIP=self.skip is not None, num_warps=1,
        )  # fmt: skip
        return y
