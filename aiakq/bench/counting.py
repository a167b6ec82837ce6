"""Counting: count operations, bytes and function calls, the same in every run of the same code."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aiakq
from aiakq import kernels
from aiakq.kernels.cpu.library import OpList

#: Torch operations that copy a tensor.
_COPIES = ("copy_", "clone", "_to_copy", "contiguous", "cat", "stack", "index_put_", "repeat")
#: Folders whose Python functions are counted. In a checkout, kernels/ is not inside aiakq/.
_FOLDERS = tuple(str(Path(str(module.__file__)).parent) for module in (aiakq, kernels))


class CountingMode(TorchDispatchMode):
    """Counts the torch operations of this thread, except views, and the bytes of the tensors they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.nbytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to torch, which would otherwise import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        if returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned):
            return result  # a view
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        if any(one.alias_info is None for one in returned):
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class Counting:
    """Context manager that counts what this thread does.

    native_calls       calls into the native library.
    native_operations  operations in those calls.
    native_rows        rows that those operations process.
    torch_operations   torch operations other than views.
    torch_copies       those of them that only copy.
    torch_bytes        bytes of the tensors they allocate.
    python_calls       calls of aiakq's Python functions, excluding comprehensions and generator expressions.
    """

    def __init__(self) -> None:
        self.by_operation: Counter[str] = Counter()
        self.by_function: Counter[str] = Counter()
        self._mode = CountingMode()
        self._native: Counter[str] = Counter()
        self._undo: Callable[[], None] | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> Counting:
        original = OpList.__call__

        def counted(op_list: OpList, threads: int = 0) -> None:
            if threading.get_ident() == self._thread:
                self._native["native_calls"] += 1
                self._native["native_operations"] += len(op_list.ops)
                self._native["native_rows"] += sum(op.m for op in op_list.ops if hasattr(op, "m"))
                self.by_operation.update(type(op).__name__ for op in op_list.ops)
            original(op_list, threads)

        setattr(OpList, "__call__", counted)  # noqa: B010
        self._undo = lambda: setattr(OpList, "__call__", original)
        self._mode.__enter__()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        self._mode.__exit__(*exc_info)
        assert self._undo is not None
        self._undo()
        self.by_operation.update({f"torch.{name}": count for name, count in self._mode.operations.items()})

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_FOLDERS) and not code.co_name.startswith("<"):
            if code.co_filename != __file__:
                self.by_function[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    def counters(self) -> dict[str, int]:
        """Return the counters by name, as listed above."""
        operations = self._mode.operations
        return {
            "native_calls": self._native["native_calls"],
            "native_operations": self._native["native_operations"],
            "native_rows": self._native["native_rows"],
            "torch_operations": sum(operations.values()),
            "torch_copies": sum(operations[name] for name in _COPIES),
            "torch_bytes": self._mode.nbytes,
            "python_calls": sum(self.by_function.values()),
        }


def set_threads() -> None:
    """Set torch to one thread, because only this thread is counted."""
    torch.set_num_threads(1)
