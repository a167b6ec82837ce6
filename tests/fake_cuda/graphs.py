"""CUDA graphs of the fake GPU: what is launched in a capture is recorded and does not run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fake_cuda.device import FakeDevice, Node, place
from fake_cuda.streams import FakeStream, Memory
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class FakeGraph:
    """A captured graph.

    While it is captured its operations are computed, because their results have shapes; then all memory from outside is
    as before, and its own has no values until it is replayed.

    stream   that is captured.
    pool_id  of its own memory.
    own      allocations of its pool.
    nodes    its operations.
    """

    _pools = itertools.count(1)

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.stream: FakeStream | None = None
        self.pool_id: object = None
        self.own: list[Memory] = []
        self.nodes: list[Node] = []
        self._reads: dict[int, Memory] = {}
        self._writes: dict[int, Memory] = {}
        self._before: dict[int, Tensor] = {}

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: Any) -> None:
        """Record what is launched on the current stream from now on."""
        device = self._device
        if device.current is device.default:
            raise device.fault("capture of the default stream", "it cannot be captured")
        device.check_not_capturing("capture_begin")
        self.stream, self.pool_id = device.current, pool or next(self._pools)
        device.capturing = self

    def capture_end(self) -> None:
        """The graph is complete."""
        self._device.capturing = None
        with _disable_current_modes():
            for key, values in self._before.items():
                self._writes[key].data.copy_(values)
            for memory in self.own:
                memory.poison()
        self._before.clear()

    def touch(self, reads: Iterable[Memory], writes: Iterable[Memory]) -> None:
        """An operation uses memory."""
        own = set(map(id, self.own))
        for memory in reads:
            if id(memory) not in own:
                self._reads[id(memory)] = memory
        for memory in writes:
            if id(memory) not in own:
                self._writes[id(memory)] = memory
                if id(memory) not in self._before:
                    self._before[id(memory)] = memory.data.clone()

    def record(self, name: str, run: Callable[[], None]) -> None:
        """Add an operation."""
        self.nodes.append(Node(name, run))

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        device = self._device
        device.check_not_capturing("replay of another graph")
        device.launches.replays += 1
        for memory in [*self._reads.values(), *self._writes.values()]:
            if memory.is_free:
                raise device.fault("graph uses memory that was freed", f"replayed at {place()}")
        alive = [memory for memory in self.own if not memory.is_free]
        device.use("replay", self._reads.values(), [*self._writes.values(), *alive])
        with _disable_current_modes():
            for memory in self.own:
                memory.poison()
            for node in self.nodes:
                node.run()

    def pool(self) -> object:
        """The pool of its memory."""
        return self.pool_id

    def reset(self) -> None:
        """Forget everything."""
        self.nodes.clear()
        self.own.clear()


def launch(device: FakeDevice, name: str, tensors: list[Any], run: Callable[[], None]) -> None:
    """Launch a kernel of Triton over ``tensors``, each of which it may modify."""
    with _disable_current_modes(), torch.inference_mode():
        memories = list({id(each.memory): each.memory for each in tensors}.values())
        if device.capturing is None:
            device.run(name, run, [], memories)
        else:
            # What it would compute is forgotten at the end of the capture.
            device.run(name, lambda: None, [], memories)
            device.capturing.record(name, run)
