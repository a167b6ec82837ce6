"""Asynchronous copies between the host and a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_device(values: object, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers [...] to ``device``, for work launched after the call.

    values  a list of numbers, possibly nested, whose shape the result has; or a tensor [...] on the host.
    dtype   of the result for a list; None: int64, float32 or bool, as in torch.tensor.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda" and torch.cuda.is_available():
        # A copy from pageable memory would be synchronous.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def copies_on_host(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Start copying ``tensors`` [...], of any shape and dtype, to the host. The returned function waits for the copies,
    not for work launched later, and returns them. Host tensors are not copied.
    """
    # A non-blocking copy from a GPU goes to pinned memory.
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
