"""Gathering of activations between ranks on one machine, through shared memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import threads_for

#: Why a group was given up, in addition to the constants of src/ops.def.
_GIVEN_UP = 1
#: Size of each of the two buffers in bytes; larger tensors are transferred in parts.
BUFFER_BYTES = 4 << 20


def memory_bytes(size: int) -> int:
    """Return the bytes of shared memory that ``size`` ranks need; it must be zero-initialized."""
    return _control_bytes(size) + 2 * BUFFER_BYTES


def _control_bytes(size: int) -> int:
    line = library.load_library().constants["CONTROL_LINE"] * 4
    return -(-(1 + size) * line // mmap.PAGESIZE) * mmap.PAGESIZE


class NativeCollective:
    """Collective operations of one rank; the interface is Collective in ops/sharded.py.

    can_start_over  whether an operation in progress can be abandoned without giving up the group.
    can_broadcast   whether rank 0 can send the other ranks data that only its device has.
    failure         empty: operations do not fail.
    memory          ``memory_bytes(size)`` bytes shared by all ranks.
    time_limit      seconds that a rank waits for another before it gives up the group.
    """

    can_start_over = True
    can_broadcast = False
    failure = ""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, time_limit: float) -> None:
        self.rank, self.size = rank, size
        native = library.load_library()
        self._memory = memory  # the operation points into it
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        line = native.constants["CONTROL_LINE"] * 4
        self._own = ctypes.c_int32.from_address(start + (1 + rank) * line)
        self.time_limit = time_limit
        self._interrupted, self._late, self._lost = (native.constants[name] for name in ("INTERRUPTED", "LATE", "LOST"))
        self._reason = ctypes.c_int32.from_address(start)
        self._group = group = native.structs["RankGroup"]()
        group.rank, group.size, group.time_limit = rank, size, round(time_limit * 1000)
        group.control, group.buffers, group.buffer_bytes = start, start + _control_bytes(size), BUFFER_BYTES
        self.op = op = library.new_op("gather")
        op.group = ctypes.addressof(group)
        self.ops = library.OpList(op)

    @property
    def num_barriers(self) -> int:
        """Number of barriers with the other ranks: one per gather, or one per part of a large gather."""
        count: int = self._group.num_barriers
        return count

    @property
    def operation(self) -> str:
        """Description of the operation that this rank is in, for error messages."""
        return f"gather {self.num_barriers}"

    @property
    def late_rank(self) -> int | None:
        """The rank that did not arrive in time, if that is why the group was given up."""
        reason = self._reason.value
        return reason - self._late if self._late <= reason < self._lost else None

    @property
    def lost_rank(self) -> int | None:
        """The rank whose connection was lost, if that is why the group was given up; None with shared memory."""
        reason = self._reason.value
        return reason - self._lost if reason >= self._lost else None

    @property
    def is_given_up(self) -> bool:
        """Whether the results of gathers are no longer valid."""
        return self._reason.value != 0

    def connect(self, limit: float) -> None:
        """Do nothing: shared memory is available from the start, so ``limit`` has no effect."""

    def watch_step(self) -> None:
        """Do nothing: this rank itself waits for the others."""

    def give_up(self) -> None:
        """Stop all ranks from waiting, permanently."""
        if not self.is_given_up:
            self._reason.value = _GIVEN_UP

    def interrupt(self) -> None:
        """Stop all ranks from waiting until they start over."""
        if not self.is_given_up:
            self._reason.value = self._interrupted

    def start_over(self) -> None:
        """Reset the synchronization counters. Every rank calls this while none gathers, rank 0 last."""
        self._group.num_barriers = self._own.value = 0
        if self.rank == 0 and self._reason.value == self._interrupted:
            self._reason.value = 0

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """Gather x [M, local columns] -> [M, N]; see Collective."""
        first, n = bounds[self.rank], bounds[-1]
        if x.dim() != 2 or x.shape[1] != bounds[self.rank + 1] - first or (x.numel() and x.stride(1) != 1):
            raise ValueError(f"rows {list(x.shape)} for columns {first} to {bounds[self.rank + 1]}")
        op = self.op
        y = torch.empty(len(x), n, dtype=x.dtype)
        with self.ops.lock:
            op.m, op.type, op.columns, op.n, op.first = len(x), TYPES[x.dtype], x.shape[1], n, first
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), n
            self.ops(threads_for(y.numel()))
        return y

    def sum(self, x: Tensor) -> Tensor:
        """Sum x [M, N] over ranks -> [M, N], in float32 and in rank order; see Collective."""
        m, n = x.shape
        parts = self.gather(x, [rank * n for rank in range(self.size + 1)]).view(m, self.size, n)
        total = parts[:, 0].float()
        for rank in range(1, self.size):
            total += parts[:, rank]
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> None:
        """Not supported: on a CPU, rank 0 sends everything in its messages. x [...]."""
        raise NotImplementedError
