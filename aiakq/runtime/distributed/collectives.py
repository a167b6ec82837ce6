"""Collectives: what the ranks of a stage meet through, in each of these processes."""

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
    """A Collective of processes that may be lost.

    can_start_over  whether an operation that was begun can be given up without giving up the group.
    can_broadcast   whether it has ``broadcast``, for what rank 0 knows only on its device.
    failure         of an operation, in words, for which the group was given up; empty if there is none.
    """

    can_start_over: bool
    can_broadcast: bool
    failure: str

    @property
    def late_rank(self) -> int | None:
        """The rank that did not come in time, if the group was given up for that."""

    @property
    def lost_rank(self) -> int | None:
        """The rank to which the connection ended, if the group was given up for that."""

    @property
    def place(self) -> str:
        """Where this rank is, in words."""

    @property
    def is_given_up(self) -> bool:
        """Whether what operations return is of no use any more."""

    def connect(self, limit: float) -> None:
        """Meet the others, each of which calls this. After ``limit`` seconds the group is given up."""

    def watch_step(self) -> None:
        """Watch whether what was launched before ends within the time limit."""

    def give_up(self) -> None:
        """End all waiting, for good."""

    def interrupt(self) -> None:
        """End all waiting, of all ranks, until they start over."""

    def start_over(self) -> None:
        """Forget what was interrupted. Every rank does this while none waits, rank 0 as the last one."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x [...], which is contiguous, with that of rank 0."""


def unavailable(transport: str, device_type: str) -> str | None:
    """Why ranks on such devices cannot meet in this way, or None."""
    return torch_collective.unavailable(device_type) if transport == "torch" else library.unavailable()


def descriptor_bytes(transport: str, size: int) -> int:
    """Bytes of the file that ``size`` ranks inherit."""
    return 0 if transport == "torch" else memory_bytes(size)


def open_collective(
    transport: str, descriptor: int, rank: int, size: int, time_limit: float, device: torch.device
) -> RankCollective:
    """A rank's part in what ``size`` ranks compute together.

    transport   memory: they share that of ``descriptor``; torch: torch.distributed, which begins with it.
    descriptor  of an inherited file of ``descriptor_bytes``; it may be closed afterwards.
    """
    if transport == "torch":
        return TorchCollective(descriptor, rank, size, time_limit, device)
    return NativeCollective(mmap.mmap(descriptor, memory_bytes(size)), rank, size, time_limit)
