"""Launcher of selective_scan_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.recurrent_types import SelectiveScanProblem, SelectiveScanSpec
from aiakq.kernels.triton.attention_blocks import power_of_two
from aiakq.kernels.triton.states import state_tables
from aiakq.kernels.types import AttentionContext

#: State elements that a program of one warp holds in registers, with as many rates.
HELD = 1024
#: Maximum size of a channel's state: a program holds at least four channels.
MAX_STATE_SIZE = 256


def supports(problem: SelectiveScanProblem) -> str | None:
    """Return None, or why not."""
    reason = triton.unsupported_dtype("selective scan", problem)
    if reason is None and problem.state_size > MAX_STATE_SIZE:
        reason = f"states have at most {MAX_STATE_SIZE} elements"
    return reason


def prepare(spec: SelectiveScanSpec, problem: SelectiveScanProblem) -> TritonSelectiveScan:
    """Prepare the selective scan of one layer."""
    return TritonSelectiveScan(spec)


class TritonSelectiveScan:
    """Triton selective scan; the interface is SelectiveScan in ops/selective_scan.py."""

    def __init__(self, spec: SelectiveScanSpec) -> None:
        self.rate = -spec.a_log.float().exp().T.contiguous()
        self.step_bias, self.skip = spec.step_bias.float().contiguous(), spec.skip.float().contiguous()

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
        """x, steps and gate [T, C], keys and queries [T, N], whose rows may be strided -> [T, C]."""
        from aiakq.kernels.triton.selective_scan_kernel import selective_scan_kernel

        size, channels = self.rate.shape
        assert states.shape[1:] == self.rate.shape and states.is_contiguous(), "the states of this layer"
        tables, width = state_tables(context, x.device), power_of_two(size)
        y = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
        y[context.query_start_list[-1] :] = 0
        block = HELD // width
        selective_scan_kernel[(-(-channels // block), len(tables.sources))](
            x, steps, keys, queries, gate, self.rate, self.step_bias, self.skip, states,
            tables.sources, context.query_start, tables.firsts, tables.saves, y,
            x.stride(0), steps.stride(0), keys.stride(0), queries.stride(0), gate.stride(0),
            C=channels, N=size, WIDTH=width, BLOCK=block, num_warps=1,
        )  # fmt: skip
        return y
