"""What has happened before what on a fake GPU: vector clocks of the host, streams and events, and accesses to memory.

The host and every stream are actors that count what they do. A clock has, for each actor, the number of the last of its
actions that is known to be over. Work on a stream starts after what the host knows when it launches it, and after what
is before it on its stream; events carry the clock of one actor to another.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class CudaFault(RuntimeError):
    """What would be undefined, wrong or refused on a GPU.

    kind  one of the names that docs/gpu.md lists.
    """

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(f"{kind}: {details}")
        self.kind = kind


class Clock(dict[str, int]):
    """Actor -> number of its last action that is over."""

    def join(self, other: Clock) -> None:
        """Everything that ``other`` knows to be over is over."""
        for actor, number in other.items():
            if number > self.get(actor, 0):
                self[actor] = number

    def has(self, access: Access) -> bool:
        """Whether ``access`` is over."""
        return self.get(access.actor, 0) >= access.number


class Access(NamedTuple):
    """An action of an actor, and the operation that it was."""

    actor: str
    number: int
    operation: str


@dataclass(eq=False)
class Memory:
    """An allocation of the GPU.

    data     the CPU's tensor, one-dimensional, of all its bytes.
    stream   it was allocated on; its memory can be reused there as soon as it is freed.
    pool     None, or the graph pool that it is in.
    written  the last write.
    reads    the last read of every actor since.
    used     the last use by every stream.
    recorded streams that ``record_stream`` has named: the allocator waits for them.
    """

    data: torch.Tensor
    stream: str
    pool: object | None
    written: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)
    used: dict[str, Access] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    is_free: bool = False

    def conflict(self, clock: Clock, writes: bool) -> Access | None:
        """An access that is not over, which one with ``clock`` must not meet."""
        others = [self.written] if self.written is not None else []
        others += self.reads.values() if writes else []
        return next((other for other in others if not clock.has(other)), None)

    def note(self, access: Access, writes: bool) -> None:
        """Keep an access."""
        self.used[access.actor] = access
        if writes:
            self.written, self.reads = access, {}
        else:
            self.reads[access.actor] = access

    def poison(self) -> None:
        """Overwrite it with values that no result may depend on: NaN in every kind of float, large integers."""
        self.data.fill_(0xFF)
        self.data[1::2] = 0x7F


class Lease:
    """What tensors of one allocation share: without tensors it is freed."""

    def __init__(self, memory: Memory, device: Any) -> None:
        self.memory = memory
        self._device = device

    def __del__(self) -> None:
        self._device.free(self.memory)


class FakeStream:
    """A stream: work on it runs in the order in which it was launched."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any, name: str | None = None) -> None:
        self.device_state = device
        self.name = name or f"stream {next(self._numbers)}"
        self.clock = Clock()
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: FakeEvent) -> None:
        """Later work waits for what was before the event."""
        self.device_state.check_capture_of(event)
        self.clock.join(event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        """Later work waits for what has been launched on the other stream."""
        self.clock.join(other.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event after what has been launched."""
        event = event or FakeEvent(self.device_state)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for what has been launched."""
        self.device_state.wait("Stream.synchronize", self.clock)

    def query(self) -> bool:
        """Whether everything is over; it may be."""
        return bool(self.device_state.poll("Stream.query", self.clock))


class FakeEvent:
    """A point in the work of a stream."""

    def __init__(self, device: Any) -> None:
        self._state = device
        self.clock = Clock()
        self.graph: object | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        """Mark what has been launched on ``stream``, the current one unless given."""
        stream = stream or self._state.current
        self.clock = Clock(stream.clock)
        self.graph = self._state.graph_of(stream)

    def wait(self, stream: FakeStream | None = None) -> None:
        """Later work on ``stream`` waits for the event."""
        (stream or self._state.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._state.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        """Whether it has happened; it may have."""
        return bool(self._state.poll("Event.query", self.clock))
