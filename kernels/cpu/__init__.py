"""CPU kernels in C++ (src/), the build of their library, and a Python launcher per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def unsupported(device: str, *dtypes: torch.dtype) -> str | None:
    """Return why the native library cannot compute on floats of these dtypes on this kind of device, or None.

    Integer dtypes are ignored. A library that was not built counts as a reason, not as an error.
    """
    # Imported here because setup.py imports kernels.cpu.build without torch.
    from aiakq.kernels.cpu import library
    from aiakq.kernels.selection import OtherDevice

    if device != "cpu":
        return OtherDevice("it runs on CPUs")
    for dtype in dtypes:
        if dtype not in library.TYPES or not dtype.is_floating_point:
            return f"it does not compute with {dtype}"
    return library.unavailable()
