"""Marks what ``torch.empty`` and its relatives allocate as never written, for the emulator to see reads of it.

Every eight bytes of such memory hold a pattern of their address, which the core looks for; see global.h. Whatever a
kernel or torch writes is then known to have been written, and nobody has to report it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ptx import library
from torch import Tensor

#: Functions that return memory as it is.
FUNCTIONS = ("empty", "empty_like", "empty_strided")
METHODS = ("new_empty", "new_empty_strided")


def mark_unwritten() -> None:
    """Let these functions fill what they allocate on CPUs with the pattern, from now on."""
    for place, names in ((torch, FUNCTIONS), (Tensor, METHODS)):
        for name in names:
            setattr(place, name, _filling(getattr(place, name)))


def _filling(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def allocate(*arguments: Any, **options: Any) -> Tensor:
        made = function(*arguments, **options)
        if made.device.type == "cpu" and made.layout == torch.strided and made.numel():
            fill(made)
        return made

    return allocate


def fill(tensor: Tensor) -> None:
    """Mark all of the storage of ``tensor`` as never written."""
    storage = tensor.untyped_storage()
    library.library().ptx_fill(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
