"""CPU kernels in C++ (src/), the build of their library, and a Python launcher per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiakq.kernels.selection import KernelProblem


def unsupported(problem: KernelProblem) -> str | None:
    """Return why the native library cannot compute with the dtypes of ``problem``, or None.

    A library that was not built counts as a reason, not as an error.
    """
    # Imported here because setup.py imports kernels.cpu.build without torch.
    from aiakq.kernels.cpu import library

    for dtype in (getattr(problem, "weight_dtype", problem.dtype), problem.dtype):
        if dtype not in library.TYPES or not dtype.is_floating_point:
            return f"it does not compute with {dtype}"
    return library.unavailable()
