"""Numbers of the host as tensors, without waiting for the GPU."""

from __future__ import annotations

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


def on_host(values: Tensor) -> list:
    """The numbers of a tensor; this waits for all that its device was told to do."""
    return values.tolist()
