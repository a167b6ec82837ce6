"""Native operations noted down instead of run, so that all of them can be run again and again in one call.

    with Recording() as recording:
        y = function(x)
    call = recording.call()      # what ``function`` would have run, one list of operations
    ...                          # change the contents of x, or op.m
    call()                       # y is computed anew

Nothing is computed while it records. Tensors that are made meanwhile lie in memory that belongs to the recording; what
nobody holds any more gives its place to others, as it did for the function.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import Call

_aten = torch.ops.aten


class NotRecordable(Exception):
    """Something is computed that is no native operation; says what."""


class Recording(TorchDispatchMode):
    """Notes native operations while it is active. Raises NotRecordable at the first that torch would compute.

    ops  copies of the operations' structs, in their order; their ``m`` and addresses may be changed afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[ctypes.Structure] = []
        self._memory = _Memory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks: it would import its compiler, a second and 100 MB, to keep it from compiling this."""
        return False

    def __enter__(self) -> Recording:
        assert library.recorder is None, "recordings are not nested"
        library.recorder = self._note
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        library.recorder = None
        super().__exit__(*problem)

    def call(self) -> Call:
        """All that was noted, to be run in one go. It keeps the memory that was given out, not the inputs."""
        call = Call(*self.ops)
        call.kept = self._memory.pieces
        return call

    def _note(self, ops: tuple[ctypes.Structure, ...]) -> None:
        self.ops += (type(op).from_buffer_copy(op) for op in ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.empty.memory_format:
            return self._memory.tensor(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is _aten.empty_like.default and args[0].is_contiguous():
            return self._memory.tensor(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        returned = func._schema.returns
        if returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned):
            return func(*args, **kwargs)  # a view
        raise NotRecordable(f"torch computes {func}")


class _Memory:
    """Memory for tensors: the place of one that is gone is given to the next of about its size."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def tensor(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        needed = count * dtype.itemsize
        fitting = [size for size, pieces in self._free.items() if pieces and needed <= size <= 2 * needed]
        if fitting:
            piece = self._free[min(fitting)].pop()
        else:
            piece = library.scratch_bytes(needed)
            self.pieces.append(piece)
        held = (ctypes.c_char * needed).from_address(piece.data_ptr())
        # The tensor's storage holds this, and lets go of it when no view is left.
        weakref.finalize(held, self._free[piece.numel()].append, piece).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=count).view(tuple(shape))
