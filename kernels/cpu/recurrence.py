"""CPU linear recurrences. A token's result does not depend on how tokens are split into steps."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.attention import check_rows, step_tables
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.recurrent_types import RecurrenceProblem, RecurrenceSpec
from aiakq.kernels.types import AttentionContext

#: The same value as in src/ops.def.
MAX_KEY_SIZE = 256
_KINDS = {"state_space": 0, "delta_rule": 1, "channel_delta_rule": 2}


def supports(problem: RecurrenceProblem) -> str | None:
    """Return None, or why not."""
    return f"keys have at most {MAX_KEY_SIZE} elements" if problem.key_dim > MAX_KEY_SIZE else None


def prepare(spec: RecurrenceSpec, problem: RecurrenceProblem) -> NativeRecurrence:
    """Prepare the recurrence of one layer."""
    return NativeRecurrence(spec)


class NativeRecurrence:
    """The recurrence of one layer; the interface is Recurrence in ops/recurrence.py."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self._kept = [-spec.a_log.float().exp(), spec.step_bias.float().contiguous()]
        self._kept += [] if spec.skip is None else [spec.skip.float().contiguous()]
        self._width, self._state_shape = spec.width, spec.state_shape
        self._gates = spec.gates_width
        self.op = op = library.new_op("recurrence")
        op.recurrence = _KINDS[spec.kind]
        op.heads, op.key_heads = spec.num_heads, spec.num_key_heads
        op.key_size, op.value_size = spec.key_dim, spec.value_dim
        op.rate, op.step_bias = (library.address(tensor) for tensor in self._kept[:2])
        op.skip = None if spec.skip is None else library.address(self._kept[2])
        op.step_low, op.step_high = spec.step_limits
        op.strength = spec.strength
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """x [T, width] and gates [T, gates_width] of the same dtype -> [T, H * value_dim]."""
        op, tables = self.op, step_tables(context)
        check_rows(x, self._width)
        check_rows(gates, self._gates)
        assert len(gates) == len(x) and gates.dtype == x.dtype, "rows that belong together"
        tables.check_states(states, self._state_shape, len(x))
        y = torch.empty(len(x), op.heads * op.value_size, dtype=x.dtype)
        with self.ops.lock:
            op.m, op.type, op.step, op.states = len(x), TYPES[x.dtype], tables.address, states.data_ptr()
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            op.gates, op.gates_stride = gates.data_ptr(), gates.stride(0)
            self.ops()
        return y
