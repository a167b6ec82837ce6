"""Copies from the host to a device and back that do not wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers [...] on ``device``, for work launched after the call.

    values  a list of numbers, or of such lists, whose shape the result has; or a tensor [...] of the host.
    dtype   of the result for a list; None: int64, float32 or bool, as torch.tensor.
    """
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    if device.type == "cuda" and torch.cuda.is_available():
        # A copy from pageable memory would be synchronous.
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> Callable[[], list[list]]:
    """Start copying ``tensors``, of any shape and dtype, to the host. The function returned waits for the work launched
    before the copy, not for later work, and gives the numbers of each tensor.
    """
    copied = copies_on_host(*tensors)
    return lambda: [copy.tolist() for copy in copied()]


def copies_on_host(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """The same for tensors [...] of any shape; the function returned gives tensors. One on the host is not copied."""
    # torch copies to pinned memory from a GPU if it need not wait.
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    arrived = None
    if any(tensor.is_cuda for tensor in tensors):
        arrived = torch.cuda.Event()
        arrived.record()

    def wait() -> list[Tensor]:
        if arrived is not None:
            arrived.synchronize()
        return copies

    return wait
