"""Collectives of the ranks of a stage: the interface that RankGroup relies on, and the transports behind it."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch

from aiakq.kernels import torch_collective
from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes
from aiakq.kernels.ops.sharded import Collective
from aiakq.kernels.torch_collective import TorchCollective


class RankCollective(Collective, Protocol):
    """A Collective over processes that may die or hang.

    can_start_over  whether a running operation can be interrupted without giving up the group.
    can_broadcast   whether ``broadcast`` is available, for tensors that rank 0 has only on its device.
    failure         description of the failed operation for which the group was given up; empty if there is none.
    """

    can_start_over: bool
    can_broadcast: bool
    failure: str

    @property
    def late_rank(self) -> int | None:
        """The rank that missed the time limit, if the group was given up for that; else None."""

    @property
    def lost_rank(self) -> int | None:
        """The rank whose connection was lost, if the group was given up for that; else None."""

    @property
    def operation(self) -> str:
        """Description of the operation that this rank is in, for error messages."""

    @property
    def is_given_up(self) -> bool:
        """Whether the group was given up; results of its operations are then invalid."""

    def connect(self, limit: float) -> None:
        """Rendezvous with the other ranks, which all call this. Give up the group after ``limit`` seconds."""

    def watch_step(self) -> None:
        """Start a watchdog for the operations launched so far: they must end within the time limit."""

    def give_up(self) -> None:
        """Give up the group: end all waiting operations for good."""

    def interrupt(self) -> None:
        """End all waiting operations of all ranks, until they call ``start_over``."""

    def start_over(self) -> None:
        """Reset after ``interrupt``. Every rank calls this while no operation is running, rank 0 last."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Broadcast x [...] from rank 0, in place; x must be contiguous."""


def is_lost(collective: RankCollective | None) -> bool:
    """Whether the ranks of a stage cannot go on, and what arrives from their devices is not valid."""
    return collective is not None and collective.is_given_up and not collective.can_start_over


def unavailable(transport: str, device_type: str) -> str | None:
    """Return why ranks on devices of this type cannot use ``transport``, or None if they can."""
    return torch_collective.unavailable(device_type) if transport == "torch" else library.unavailable()


def descriptor_bytes(transport: str, size: int) -> int:
    """Return the size in bytes of the memory file that ``size`` ranks inherit."""
    return 0 if transport == "torch" else memory_bytes(size)


def open_collective(
    transport: str, descriptor: int, rank: int, size: int, time_limit: float, device: torch.device
) -> RankCollective:
    """Open the collective of ``size`` ranks in the process of ``rank``.

    transport   ``memory``: shared memory; ``torch``: torch.distributed.
    descriptor  inherited file of ``descriptor_bytes`` bytes: the shared memory, or the rendezvous file of
                torch.distributed. It may be closed afterwards.
    """
    if transport == "torch":
        return TorchCollective(descriptor, rank, size, time_limit, device)
    return NativeCollective(mmap.mmap(descriptor, memory_bytes(size)), rank, size, time_limit)
