"""CPU selective scan. A token's result does not depend on how tokens are split into steps."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.attention import check_rows, step_tables
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.recurrent_types import SelectiveScanProblem, SelectiveScanSpec
from aiakq.kernels.types import AttentionContext

#: The same value as in src/ops.def.
MAX_STATE_SIZE = 256


def supports(problem: SelectiveScanProblem) -> str | None:
    """Return None, or why not."""
    return f"states have at most {MAX_STATE_SIZE} elements" if problem.state_size > MAX_STATE_SIZE else None


def prepare(spec: SelectiveScanSpec, problem: SelectiveScanProblem) -> NativeSelectiveScan:
    """Prepare the selective scan of one layer."""
    return NativeSelectiveScan(spec)


class NativeSelectiveScan:
    """The selective scan of one layer; the interface is SelectiveScan in ops/selective_scan.py."""

    def __init__(self, spec: SelectiveScanSpec) -> None:
        self._kept = [-spec.a_log.float().exp().T.contiguous(), spec.step_bias.float().contiguous()]
        self._kept.append(spec.skip.float().contiguous())
        self._state_shape = spec.state_shape
        self.op = op = library.new_op("selective_scan")
        op.state_size, op.channels = spec.state_shape
        op.rate, op.step_bias, op.skip = (library.address(tensor) for tensor in self._kept)
        self.ops = library.OpList(op)

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
        """x, steps and gate [T, C], keys and queries [T, state_size] of one dtype -> [T, C]."""
        op, tables = self.op, step_tables(context)
        for rows in (x, steps, gate, keys, queries):
            check_rows(rows, op.state_size if rows is keys or rows is queries else op.channels)
            assert len(rows) == len(x) and rows.dtype == x.dtype, "rows that belong together"
        tables.check_states(states, self._state_shape, len(x))
        y = torch.empty(x.shape, dtype=x.dtype)
        with self.ops.lock:
            op.m, op.type, op.step, op.states = len(x), TYPES[x.dtype], tables.address, states.data_ptr()
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            op.steps, op.steps_stride = steps.data_ptr(), steps.stride(0)
            op.keys, op.keys_stride = keys.data_ptr(), keys.stride(0)
            op.queries, op.queries_stride = queries.data_ptr(), queries.stride(0)
            op.gate, op.gate_stride = gate.data_ptr(), gate.stride(0)
            self.ops()
        return y
