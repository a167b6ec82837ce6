"""Collective operations of ranks with torch.distributed: NCCL between GPUs, gloo between CPUs.

Ranks on one machine rendezvous through an anonymous file that they inherit, so that no port is used and no file is left
behind. On a GPU an operation is only launched: a thread watches whether it finishes in time.
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

#: Seconds between two polls.
_PAUSE = 0.05
#: Seconds in which every live rank reports its progress after one has waited too long.
_REPORT_SECONDS = 1.0


def unavailable(device_type: str) -> str | None:
    """Return why ranks on such devices cannot use torch.distributed, or None."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if device_type == "cuda":
        return None if dist.is_nccl_available() else "this torch was built without NCCL"
    return None if dist.is_gloo_available() else "this torch was built without gloo"


class TorchCollective:
    """Collective operations of one rank; the interface is Collective in ops/sharded.py.

    Sums of NCCL and gloo are equal on all ranks; rounding depends on the number of ranks.

    An operation launched on a GPU cannot be cancelled: if one rank runs out of memory, all of them end.

    time_limit  seconds that a rank waits for another before it gives up the group.
    late_rank   the rank that did not arrive in time, if that is why the group was given up.
    failure     error message of the operation that made the group give up; empty if there is none.
    """

    can_start_over = False
    can_broadcast = True

    def __init__(self, descriptor: int, rank: int, size: int, time_limit: float, device: torch.device) -> None:
        """descriptor: of an empty file inherited by all ranks, which they use for rendezvous."""
        self.rank, self.size, self.time_limit = rank, size, time_limit
        self.late_rank: int | None = None
        self.lost_rank: int | None = None  # indistinguishable from other failures here; the parent process knows
        self.failure = ""
        self.num_operations = 0
        self._device = device
        # Never closed: torch threads may access it until the process ends, and its number must not be reused.
        self._store = dist.FileStore(f"/proc/self/fd/{os.dup(descriptor)}", size)
        self._backend: object = None
        self._is_given_up = False
        self._watch: StepWatch | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the results of other methods are no longer valid."""
        return self._is_given_up

    @property
    def operation(self) -> str:
        """Description of the operation that this rank is in, for error messages."""
        return (
            f"operation {self.num_operations} of torch.distributed"
            if self._backend
            else "initializing the process group"
        )

    def connect(self, limit: float) -> None:
        """Rendezvous with the other ranks, which also call this. Give up the group after ``limit`` seconds."""
        self._store.set(f"here/{self.rank}", "1")
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
        # Communicators are created on first use, which must not happen inside a CUDA graph.
        self.sum(torch.ones(1, 1, device=self._device))
        if self._device.type == "cuda":
            self._watch = StepWatch(self.time_limit, self._find_late_rank)
            self.watch_step()
            torch.cuda.synchronize(self._device)

    def give_up(self) -> None:
        """Stop this rank from waiting, permanently. The other ranks notice that it is gone."""
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._watch is not None:
            self._watch.stop()
        if self._backend is not None and hasattr(self._backend, "abort"):
            # abort waits for operations to end, and they end only because of it.
            threading.Thread(target=_aborted, args=(self._backend,), daemon=True).start()

    def interrupt(self) -> None:
        """Do nothing: launched operations run to completion on every rank."""

    def start_over(self) -> None:
        """Do nothing, like ``interrupt``."""

    def watch_step(self) -> None:
        """Watch whether the work launched so far finishes within the time limit."""
        if self._watch is not None and not self._is_given_up:
            event = torch.cuda.Event()
            event.record()
            self._watch.add(event.query)

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """Gather x [M, local columns] -> [M, N]; see Collective."""
        _refuse_recording()
        widths = [end - first for first, end in zip(bounds, bounds[1:], strict=False)]
        if x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"rows {list(x.shape)} for {widths[self.rank]} columns")
        (m, n), width = (len(x), bounds[-1]), max(widths)
        if m == 0 or n == 0:
            return x.new_empty(m, n)
        if x.shape[1] < width:
            # All ranks send as many columns as the widest one.
            padded = x.new_zeros(m, width)
            padded[:, : x.shape[1]] = x
            x = padded
        parts = x.new_empty(self.size, m, width)
        self._run("_allgather_base", parts.view(-1, width), x.contiguous(), dist.distributed_c10d.AllgatherOptions())
        if min(widths) == width:
            return parts.view(1, n) if m == 1 else parts.transpose(0, 1).reshape(m, n)
        return torch.cat([part[:, :own] for part, own in zip(parts, widths, strict=True)], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce x [M, N] -> [M, N], in place if ``x`` is contiguous; see Collective."""
        _refuse_recording()
        x = x.contiguous()
        if x.numel():
            self._run("allreduce", [x], dist.AllreduceOptions())
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrite the contiguous tensor x [...] with that of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._run("broadcast", [x], options)

    def _run(self, operation: str, *arguments: Any) -> None:
        """Run an operation of the backend; on a GPU, enqueue it after previously launched work."""
        self.num_operations += 1
        if self._is_given_up:
            return
        with contextlib.suppress(AttributeError):  # before torch 2.7
            arguments[-1].asyncOp = False  # use the caller's stream instead of an internal one
        try:
            work = getattr(self._backend, operation)(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as failure:
            if "timed out" in str(failure).lower():
                self._find_late_rank()
            else:
                # Usually another rank has exited.
                self.failure = self.failure or " ".join(str(failure).split())[:300]
                self.give_up()

    def _find_late_rank(self) -> None:
        """Give up the group because of the rank that is not waiting, or that has progressed least."""
        if self._is_given_up:
            return
        self._store.set(f"waits/{self.rank}", str(self.num_operations))
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
        raise RecordingError("ranks communicate through torch.distributed")


def _gloo(collective: TorchCollective) -> dist.ProcessGroupGloo:
    """Create a gloo process group restricted to the loopback interface."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=collective.time_limit)
    return dist.ProcessGroupGloo(collective._store, collective.rank, collective.size, options)


def _nccl(collective: TorchCollective) -> dist.ProcessGroupNCCL:
    """Create an NCCL process group restricted to the loopback interface. Its timeout is a fallback for the watch."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # With error handling, NCCL would end the process without naming the late rank.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * collective.time_limit + 60)
    return dist.ProcessGroupNCCL(collective._store, collective.rank, collective.size, options)


def _aborted(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


class StepWatch:
    """A thread that detects steps which do not finish on their device. The host waits for results without a timeout,
    and a missing rank keeps the other ranks' GPUs busy.
    """

    def __init__(self, limit: float, on_late: Callable[[], None]) -> None:
        """on_late: called once, in the thread, when a step has taken ``limit`` seconds."""
        self._limit, self._on_late = limit, on_late
        self._steps: deque[tuple[Callable[[], bool], float]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        threading.Thread(target=self._run, name="step-watch", daemon=True).start()

    def add(self, is_done: Callable[[], bool]) -> None:
        """Watch one more step, which begins when the previous ones have finished."""
        with self._changed:
            self._steps.append((is_done, time.monotonic()))
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread."""
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
