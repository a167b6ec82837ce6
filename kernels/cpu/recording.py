"""Records calls of native operations and replays them in a single call.

    with Recording() as recording:
        y = function(x)
    ops = recording.op_list()    # the operations that ``function`` would have run
    ...                          # change the contents of x, or op.m
    ops()                        # computes y again

Nothing is computed while recording. Tensors created in the meantime are allocated from memory that the recording owns;
memory of freed tensors is reused.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import OpList

_aten = torch.ops.aten


class RecordingError(Exception):
    """Raised when torch would compute something that is not a native operation; the message says what."""


class Recording(TorchDispatchMode):
    """Records the native operations of the current thread while active. Raises RecordingError at the first operation
    that torch would compute.

    ops  copies of the operations' structs, in order; their ``m`` and addresses may be changed afterwards.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[ctypes.Structure] = []
        self._memory = _Memory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch. Returning True would make torch import its compiler, which takes a second and 100 MB."""
        return False

    def __enter__(self) -> Recording:
        assert library.of_thread.recorder is None, "recordings are not nested"
        library.of_thread.recorder = self._record
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        library.of_thread.recorder = None
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def op_list(self) -> OpList:
        """Return all recorded operations. Keeps memory of tensors created while recording alive, but not the inputs."""
        ops = OpList(*self.ops)
        ops.memory = self._memory.blocks
        return ops

    def with_rows(self, m: int) -> list[ctypes.Structure]:
        """Return the operations that process ``m`` rows."""
        return [op for op in self.ops if op.m == m]

    def pointers_to(self, memory: Tensor) -> list[tuple[ctypes.Structure, str]]:
        """Find where ``memory`` [...] of any dtype is read or written: (operation, name of the field that points to its
        first byte).
        """
        address = memory.data_ptr()
        return [
            (op, field)
            for op in self.ops
            for field, kind, *_ in op._fields_
            if kind is ctypes.c_void_p and getattr(op, field) == address
        ]

    def _record(self, ops: tuple[ctypes.Structure, ...]) -> None:
        self.ops += (type(op).from_buffer_copy(op) for op in ops)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is _aten.empty.memory_format:
            return self._memory.tensor(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is _aten.empty_like.default and args[0].is_contiguous():
            return self._memory.tensor(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and (op := _copy_op(*args[:2])) is not None:
            self._record((op,))
            return args[0]
        returned = func._schema.returns
        if returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned):
            return func(*args, **kwargs)  # a view
        raise RecordingError(f"torch computes {func}")


def _copy_op(to: Tensor, source: Tensor) -> ctypes.Structure | None:
    """Return the operation that copies ``source`` [M, N] or [M, B, N] to ``to`` of the same shape and dtype; None for
    tensors that it cannot copy.
    """
    same = to.shape == source.shape and to.dtype == source.dtype and to.dim() in (2, 3) and to.numel() > 0
    if not same or to.stride(-1) != 1 or source.stride(-1) != 1:
        return None
    to, source = (each.unsqueeze(1) if each.dim() == 2 else each for each in (to, source))
    op, size = library.new_op("copy"), to.element_size()
    op.m, op.batch, op.bytes = to.shape[0], to.shape[1], to.shape[2] * size
    op.x, op.x_stride, op.x_batch_stride = source.data_ptr(), source.stride(0) * size, source.stride(1) * size
    op.y, op.y_stride, op.y_batch_stride = to.data_ptr(), to.stride(0) * size, to.stride(1) * size
    return op


class _Memory:
    """Allocates tensors; a block whose tensor was freed is reused for the next one of similar size."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        needed = count * dtype.itemsize
        fitting = [size for size, blocks in self._free.items() if blocks and needed <= size <= 2 * needed]
        if fitting:
            block = self._free[min(fitting)].pop()
        else:
            block = library.allocate_scratch(needed)
            self.blocks.append(block)
        buffer = (ctypes.c_char * needed).from_address(block.data_ptr())
        # The tensor's storage holds the buffer, which is finalized when the last view is gone.
        weakref.finalize(buffer, self._free[block.numel()].append, block).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))
