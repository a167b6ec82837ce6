"""A fake GPU: tensors on "cuda" whose data is on the CPU, and what a GPU would not forgive.

Operations are computed when they are launched, in the order of the host, on memory that ``torch.empty`` has filled with
NaN. What could go wrong is found by what orders accesses (streams.py), not by chance, in every run. Between the host
and the GPU data moves as late as is allowed: a copy to the host arrives when the host waits for it, and a pinned buffer
that the GPU reads must be unchanged until then.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_cuda.streams import Access, Clock, CudaFault, FakeStream, Lease, Memory
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

HOST = "host"
PAGEABLE = "copy from pageable memory"


@dataclass
class Launches:
    """What a GPU was asked to do.

    kernels    operations that run on it, by name; those of a replay are not counted one by one.
    replays    of graphs.
    to_device  asynchronous copies from pinned memory.
    to_host    asynchronous copies to pinned memory.
    waits      explicit waits of the host, by name.
    blocked    what else the host had to wait for, as (operation, place in the product): a value that it reads, a copy
               that is not asynchronous, from or to memory that is not pinned.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    to_device: int = 0
    to_host: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    blocked: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Launches) -> None:
        """Count those of ``other``, too."""
        self.kernels += other.kernels
        self.replays += other.replays
        self.to_device += other.to_device
        self.to_host += other.to_host
        self.waits += other.waits
        self.blocked += other.blocked


@dataclass(eq=False)
class Transfer:
    """An asynchronous copy that may be under way.

    host    the pinned tensor.
    data    what arrives there; or, for a copy from there, what it had when the copy was launched.
    """

    host: Tensor
    data: Tensor
    access: Access
    to_host: bool


@dataclass(eq=False)
class Node:
    """An operation of a graph: ``run`` computes it again over the same memory."""

    name: str
    run: Callable[[], None]


class FakeDevice:
    """The state of the GPU.

    current    the stream of later work.
    launches   what it was asked to do since ``counted`` was last entered.
    faults     all that were found, also those that could not be raised where they were.
    capturing  the graph that records, or None.
    """

    def __init__(self, seed: int = 0) -> None:
        self.default = FakeStream(self, "the default stream")
        self.current = self.default
        self.launches = Launches()
        self.faults: list[CudaFault] = []
        self.capturing: Any = None
        self._host = Clock()
        self._streams: list[FakeStream] = [self.default]
        self._counts: Counter[str] = Counter()
        self._transfers: list[Transfer] = []
        self._pinned: dict[int, Tensor] = {}
        self._random = random.Random(seed)
        self._is_over = False

    # Streams and waits.

    def new_stream(self) -> FakeStream:
        """A stream that is not the default one."""
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def graph_of(self, stream: FakeStream) -> Any:
        """The graph that records what is launched on ``stream``, or None."""
        return self.capturing if self.capturing is not None and self.capturing.stream is stream else None

    def check_capture_of(self, event: Any) -> None:
        """An event of a capture has a meaning in that capture alone."""
        if event.graph is not None and event.graph is not self.capturing:
            raise self.fault("event of a capture used outside", "it marks a point in a graph, not in a stream")

    def wait(self, name: str, clock: Clock) -> None:
        """The host waits until what ``clock`` knows is over."""
        self.check_not_capturing(name)
        self.launches.waits[name] += 1
        self._arrive(clock)

    def poll(self, name: str, clock: Clock) -> bool:
        """Whether what ``clock`` knows is over: if the host does not know, at random, as other work may be late."""
        self.check_not_capturing(name)
        if all(self._host.get(actor, 0) >= number for actor, number in clock.items()):
            return True
        if self._random.random() < 0.5:
            return False
        self._arrive(clock)
        return True

    def synchronize(self, name: str = "torch.cuda.synchronize") -> None:
        """The host waits for all streams."""
        everything = Clock()
        for stream in self._streams:
            everything.join(stream.clock)
        self.wait(name, everything)

    def check_not_capturing(self, name: str) -> None:
        """Fail if work is being recorded, of which nothing runs that the host could wait for."""
        if self.capturing is not None:
            raise self.fault("synchronization in a capture", f"{name} at {place()}")

    def blocks(self, name: str, for_sure: bool = True) -> None:
        """The host waits, or may wait, for the current stream because of an operation that is no explicit wait."""
        self.check_not_capturing(name)
        self.launches.blocked.append((name, place()))
        if for_sure:
            self._arrive(self.current.clock)

    def _arrive(self, clock: Clock) -> None:
        """What ``clock`` knows is over for the host: copies have arrived, and their sources may be written."""
        self._host.join(clock)
        over = [each for each in self._transfers if self._host.has(each.access)]
        self._transfers = [each for each in self._transfers if not self._host.has(each.access)]
        for each in over:
            if each.to_host:
                each.host.copy_(each.data)
            elif not _same(each.host, each.data):
                details = f"its memory has other values than when {each.access.operation} was launched"
                raise self.fault("pinned buffer overwritten while a copy from it was pending", details)

    # Faults.

    def fault(self, kind: str, details: str) -> CudaFault:
        """Keep and return a fault."""
        self.faults.append(CudaFault(kind, details))
        return self.faults[-1]

    def finish(self) -> None:
        """Wait for everything; raises the first fault."""
        if self.capturing is None:
            with _disable_current_modes():
                self.synchronize("the end")
        self._is_over = True
        if self.faults:
            raise self.faults[0]

    # Memory of the GPU.

    def allocated(self, inner: Tensor) -> Lease:
        """The allocation of a new tensor of the CPU."""
        storage = inner.untyped_storage()
        data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
        graph = self.graph_of(self.current)
        memory = Memory(data, self.current.name, None if graph is None else graph.pool_id)
        if graph is not None:
            graph.own.append(memory)
        return Lease(memory, self)

    def free(self, memory: Memory) -> None:
        """No tensor has ``memory`` any more: its stream must be behind what other streams do with it."""
        memory.is_free = True
        if self._is_over or memory.pool is not None:
            return
        clock = Clock(self._host)
        clock.join(next((stream.clock for stream in self._streams if stream.name == memory.stream), Clock()))
        for actor, access in memory.used.items():
            if actor not in (HOST, memory.stream) and actor not in memory.recorded and not clock.has(access):
                details = f"{access.operation} on {actor} may still use memory of {memory.stream} at {place()}"
                self.fault("memory freed while another stream uses it", details)

    def run(self, name: str, call: Callable[[], Any], reads: Iterable[Memory], writes: Iterable[Memory]) -> Any:
        """Launch an operation on the current stream, or record it; returns what ``call`` returns."""
        stream = self.current
        if self.capturing is not None and self.capturing.stream is not stream:
            raise self.fault("work on another stream during a capture", f"{name} on {stream.name} at {place()}")
        reads, writes = list(reads), list(writes)
        if self.capturing is not None:
            self.capturing.touch(reads, writes)
        else:
            self.launches.kernels[name] += 1
            self.use(name, reads, writes)
        return call()

    def use(self, name: str, reads: Iterable[Memory], writes: Iterable[Memory]) -> Access:
        """An action of the current stream that uses memory; it must not meet an access of another one."""
        stream = self.current
        self._counts[stream.name] += 1
        access = Access(stream.name, self._counts[stream.name], name)
        stream.clock.join(self._host)
        stream.clock[stream.name] = access.number
        for memories, is_write in ((reads, False), (writes, True)):
            for memory in memories:
                other = memory.conflict(stream.clock, is_write)
                if other is not None:
                    verb = "writes" if is_write else "reads"
                    details = f"{name} on {stream.name} {verb} what {other.operation} on {other.actor} may still use"
                    raise self.fault("accesses that no event orders", f"{details}, at {place()}")
                memory.note(access, is_write)
        return access

    # Memory of the host.

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor in pinned memory, which the test keeps for good."""
        self.check_host(tensor, False, "pin_memory")
        with _disable_current_modes():
            copy = tensor.clone(memory_format=torch.contiguous_format)
        if copy.numel():
            self._pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def check_host(self, tensor: Tensor, writes: bool, name: str) -> None:
        """The host reads or writes a tensor of its own. Raises ``CudaFault`` if a copy may be under way there."""
        if not self._transfers or tensor.layout != torch.strided or not tensor.numel():
            return
        address = tensor.untyped_storage().data_ptr()
        for each in self._transfers:
            if each.host.untyped_storage().data_ptr() != address:
                continue
            if each.to_host:
                raise self.fault("host read that no event guards", f"{name} at {place()}")
            if writes:
                details = f"{name} at {place()}"
                raise self.fault("pinned buffer overwritten while a copy from it was pending", details)

    def copy_to_device(self, host: Tensor, into: Callable[[], Any], writes: list[Memory], non_blocking: bool) -> Any:
        """Copy ``host`` to the GPU; ``into`` does it."""
        if self.capturing is not None:
            kind = "pinned" if self.is_pinned(host) else "pageable"
            details = f"replays would read the {kind} memory that the capture has seen, at {place()}"
            raise self.fault("copy between host and GPU in a capture", details)
        if not host.numel():
            return into()
        self.check_host(host, False, "copy to the GPU")
        access = self.use("copy to the GPU", [], writes)
        if self.is_pinned(host) and non_blocking:
            self.launches.to_device += 1
            self._transfers.append(Transfer(host, host.clone(), access, False))
        else:
            # The driver stages what is not pinned, for which it may wait; nobody may rely on that.
            self.blocks("copy from pinned memory" if self.is_pinned(host) else PAGEABLE, not non_blocking)
        return into()

    def copy_to_host(self, result: Tensor, host: Tensor, reads: list[Memory], non_blocking: bool) -> Tensor:
        """Copy ``result``, what the GPU has, to ``host``, which is pinned if the copy is asynchronous; returns it."""
        if self.capturing is not None:
            details = f"replays would write the memory that the capture has seen, at {place()}"
            raise self.fault("copy between host and GPU in a capture", details)
        if not host.numel():
            return host
        self.check_host(host, True, "copy from the GPU")
        access = self.use("copy from the GPU", reads, [])
        if non_blocking:
            self._pinned[host.untyped_storage().data_ptr()] = host
            self.launches.to_host += 1
            self._transfers.append(Transfer(host, result.clone(), access, True))
            poisoned(host)
        else:
            self.blocks("copy to the host")
            host.copy_(result)
        return host


def poisoned(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` with values that no result may depend on; returns it."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def place() -> str:
    """The innermost place in the product from which this was called, else in a test."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "fake_cuda/" not in name or "/test_" in name:
            if "/aiakq/" in name or "/kernels/" in name and "site-packages" not in name:
                return f"{name.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
            if not found and "/test" in name:
                found = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply ``change`` to every tensor in a tree."""
    return tree_map_only(torch.Tensor, change, tree)
