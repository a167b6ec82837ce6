"""Numbers of the host as tensors and back, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A list of numbers as a tensor on ``device``, there when what is launched next on it runs."""
    made = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and torch.cuda.is_available():
        # From memory that may be swapped out a copy is waited for.
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> Callable[[], list[list]]:
    """Start copying ``tensors`` to the host. The function returned waits for what its device was told to do up to
    here, no further, and gives the numbers of each.
    """
    # To pinned memory: so torch does it from a GPU if it need not wait.
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    arrived = None
    if any(tensor.is_cuda for tensor in tensors):
        arrived = torch.cuda.Event()
        arrived.record()

    def numbers() -> list[list]:
        if arrived is not None:
            arrived.synchronize()
        return [copy.tolist() for copy in copies]

    return numbers
