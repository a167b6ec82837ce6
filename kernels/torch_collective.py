"""Collective operations of ranks by torch.distributed: NCCL between GPUs, gloo between CPUs.

Ranks of one machine find each other through a file without a name that they have inherited, so that there is no port
and nothing is left behind. On a GPU an operation is only launched: how long others may take is watched by a thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.recording import RecordingError

#: Seconds between two looks at something that has no other way to say that it happened.
_PAUSE = 0.05
#: Seconds in which a rank that lives says that it waits, when it has waited for too long.
_REPORT_SECONDS = 1.0


def unavailable(device_type: str) -> str | None:
    """Why ranks on such devices cannot meet through torch.distributed, or None."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if device_type == "cuda":
        return None if dist.is_nccl_available() else "this torch was built without NCCL"
    return None if dist.is_gloo_available() else "this torch was built without gloo"


class TorchCollective:
    """A rank's part in a group; the interface is Collective in ops/sharded.py.

    Sums of NCCL and gloo are the same on every rank; those of another number of ranks differ in rounding.

    An operation that was launched on a GPU cannot be taken back: where one rank has not enough memory, all end.

    time_limit  seconds that a rank waits for another before it gives the group up.
    late_rank   the rank that did not come in time, if the group was given up for that.
    failure     of an operation, in words, for which the group was given up; empty if there is none.
    """

    can_start_over = False
    can_broadcast = True

    def __init__(self, descriptor: int, rank: int, size: int, time_limit: float, device: torch.device) -> None:
        """descriptor: of an empty file that all ranks have inherited, through which they find each other."""
        self.rank, self.size, self.time_limit = rank, size, time_limit
        self.late_rank: int | None = None
        self.lost_rank: int | None = None  # not told apart from others: who starts the ranks knows
        self.failure = ""
        self.num_meetings = 0
        self._device = device
        # Never closed: threads of torch may look at it until the process ends, and not at another file of this number.
        self._store = dist.FileStore(f"/proc/self/fd/{os.dup(descriptor)}", size)
        self._backend: Any = None
        self._is_given_up = False
        self._watch: StepWatch | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether what other methods return is of no use any more."""
        return self._is_given_up

    @property
    def place(self) -> str:
        """Where this rank is, in words."""
        return (
            f"operation {self.num_meetings} of torch.distributed" if self._backend else "initializing the process group"
        )

    def connect(self, limit: float) -> None:
        """Meet the others, each of which calls this. After ``limit`` seconds the group is given up."""
        self._store.set(f"here/{self.rank}", b"1")
        deadline = time.monotonic() + limit
        for other in range(self.size):
            while not self._is_given_up and not self._store.check([f"here/{other}"]):
                if time.monotonic() > deadline:
                    self._give_up_for(other)
                time.sleep(_PAUSE)
        if self._is_given_up:
            return
        self._store.set_timeout(timedelta(seconds=self.time_limit))
        self._backend = (_nccl if self._device.type == "cuda" else _gloo)(self)
        # Communicators are made at their first use, which a CUDA graph must not be.
        self.sum(torch.ones(1, 1, device=self._device))
        if self._device.type == "cuda":
            self._watch = StepWatch(self.time_limit, self._find_late_rank)
            self.watch_step()
            torch.cuda.synchronize(self._device)

    def give_up(self) -> None:
        """End all waiting of this rank, for good. The others notice that it is gone."""
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._watch is not None:
            self._watch.stop()
        if self._backend is not None and hasattr(self._backend, "abort"):
            # It waits for operations to end, which they do only because of it.
            threading.Thread(target=_aborted, args=(self._backend,), daemon=True).start()

    def interrupt(self) -> None:
        """Nothing: what was launched runs to its end on every rank."""

    def start_over(self) -> None:
        """Nothing, as ``interrupt``."""

    def watch_step(self) -> None:
        """Watch whether what was launched before ends within the time limit."""
        if self._watch is not None and not self._is_given_up:
            event = torch.cuda.Event()
            event.record()
            self._watch.add(event.query)

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """x [M, own columns] -> [M, N]; see Collective."""
        _refuse_recording()
        widths = [end - first for first, end in zip(bounds, bounds[1:], strict=False)]
        if x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"rows {list(x.shape)} for {widths[self.rank]} columns")
        (m, n), width = (len(x), bounds[-1]), max(widths)
        if m == 0 or n == 0:
            return x.new_empty(m, n)
        if x.shape[1] < width:
            # Every rank sends as much as the one with most.
            padded = x.new_zeros(m, width)
            padded[:, : x.shape[1]] = x
            x = padded
        parts = x.new_empty(self.size, m, width)
        self._run("_allgather_base", parts.view(-1, width), x.contiguous(), dist.distributed_c10d.AllgatherOptions())
        if min(widths) == width:
            return parts.view(1, n) if m == 1 else parts.transpose(0, 1).reshape(m, n)
        return torch.cat([part[:, :own] for part, own in zip(parts, widths, strict=True)], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """x [M, N] -> [M, N], in ``x`` where that is contiguous; see Collective."""
        _refuse_recording()
        x = x.contiguous()
        if x.numel():
            self._run("allreduce", [x], dist.AllreduceOptions())
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x [...], which is contiguous, with that of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._run("broadcast", [x], options)

    def _run(self, operation: str, *arguments: Any) -> None:
        """Run an operation of the backend: on a GPU, launch it behind what was launched before."""
        self.num_meetings += 1
        if self._is_given_up:
            return
        with contextlib.suppress(AttributeError):  # before torch 2.7
            arguments[-1].asyncOp = False  # on the stream of the caller, not on one of its own
        try:
            work = getattr(self._backend, operation)(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as failure:
            if "timed out" in str(failure).lower():
                self._find_late_rank()
            else:
                # Most often another rank is gone.
                self.failure = self.failure or " ".join(str(failure).split())[:300]
                self.give_up()

    def _find_late_rank(self) -> None:
        """Give the group up for the rank that waits for no other, or has waited for the longest."""
        if self._is_given_up:
            return
        self._store.set(f"waits/{self.rank}", str(self.num_meetings))
        time.sleep(_REPORT_SECONDS)

        def reached(other: int) -> int:
            key = f"waits/{other}"
            return int(self._store.get(key)) if self._store.check([key]) else -1

        self._give_up_for(min((other for other in range(self.size) if other != self.rank), key=reached))

    def _give_up_for(self, rank: int) -> None:
        if not self._is_given_up:
            self.late_rank = rank
            self.give_up()


def _refuse_recording() -> None:
    if library.of_thread.recorder is not None:
        raise RecordingError("ranks meet through torch.distributed")


def _gloo(collective: TorchCollective) -> Any:
    """gloo, over this machine's own network alone."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=collective.time_limit)
    return dist.ProcessGroupGloo(collective._store, collective.rank, collective.size, options)


def _nccl(collective: TorchCollective) -> Any:
    """NCCL; what it needs a network for goes over this machine's own. Its limit is for what the watch does not see."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # It would end the process, without a word of which rank was late.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * collective.time_limit + 60)
    return dist.ProcessGroupNCCL(collective._store, collective.rank, collective.size, options)


def _aborted(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


class StepWatch:
    """A thread that notices steps which do not end on their device: the host only waits for their results, without a
    limit, and a rank that does not come keeps the others' GPUs busy.
    """

    def __init__(self, limit: float, on_late: Callable[[], None]) -> None:
        """on_late: called once, in the thread, when a step has taken ``limit`` seconds."""
        self._limit, self._on_late = limit, on_late
        self._steps: deque[tuple[Callable[[], bool], float]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        threading.Thread(target=self._run, name="step-watch", daemon=True).start()

    def add(self, is_done: Callable[[], bool]) -> None:
        """Watch one more step, which begins when the ones before have ended."""
        with self._changed:
            self._steps.append((is_done, time.monotonic()))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        began = 0.0
        while True:
            with self._changed:
                while not self._steps and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                is_done, added = self._steps[0]
            began = max(began, added)
            if is_done():
                began = time.monotonic()
                with self._changed:
                    self._steps.popleft()
            elif time.monotonic() - began > self._limit:
                self._on_late()
                return
            else:
                time.sleep(_PAUSE)
