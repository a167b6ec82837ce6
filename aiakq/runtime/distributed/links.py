"""Links: channels that carry hidden states from one pipeline stage to the next.

The epoch of a message increases when steps are abandoned, so that the receiver can skip messages of abandoned steps.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from aiakq.runtime.models.interface import StageOutput
from aiakq.system.channel import Channel, Disconnected


class StageMessage(msgspec.Struct, tag="hidden"):
    """Hidden states of a step; their bytes follow.

    shape  [tensors, rows, hidden].
    size   bytes per value.
    """

    epoch: int
    step: int
    shape: tuple[int, int, int]
    size: int


_Link = Channel[StageMessage, StageMessage]


class LinkSender:
    """Sends hidden states to the next stage from a background thread, so that steps do not wait for the receiver.

    epoch  epoch of the steps being sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.epoch = 0
        self._channel = _Link(sock, StageMessage)
        self._queue: queue.SimpleQueue[tuple[StageMessage, list[memoryview]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, step: int, hidden: StageOutput) -> None:
        """Enqueue the hidden states [T, hidden] of a step; they are copied before this returns."""
        tensors = [hidden.x] if hidden.residual is None else [hidden.x, hidden.residual]
        message = StageMessage(self.epoch, step, (len(tensors), *hidden.x.shape), hidden.x.element_size())
        self._queue.put((message, [memoryview(bytes(_bytes_of(each.contiguous().cpu()))) for each in tensors]))

    def close(self) -> None:
        """Stop the thread and close the connection."""
        self._queue.put(None)
        self._channel.hang_up()
        self._channel.close()

    def _run(self) -> None:
        # Rank 0 detects a lost receiver through its control connection.
        with contextlib.suppress(Disconnected):
            while (queued := self._queue.get()) is not None:
                self._channel.send(queued[0], *queued[1])


class LinkReceiver:
    """Receives hidden states from the previous stage.

    epoch  epoch of the expected steps; messages of earlier epochs are skipped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = _Link(sock, StageMessage)
        self.epoch = 0

    def receive(self, step: int, like: Tensor, wait: Callable[[], bool]) -> StageOutput | None:
        """Return the hidden states of ``step``, with the shape and dtype of ``like`` [T, hidden].

        wait  blocks until the socket is readable and returns True; if it returns False, this returns None.

        Raises ConnectionError if the sender is gone, ValueError for an unexpected message.
        """
        while wait():
            message = self._channel.receive()
            if message is None:
                raise Disconnected("the previous stage closed its connection")
            if message.epoch != self.epoch:
                self._channel.receive_into(memoryview(bytearray(math.prod(message.shape) * message.size)))
                continue
            count, *shape = message.shape
            if (message.step, message.size, *shape) != (step, like.element_size(), *like.shape) or count not in (1, 2):
                raise ValueError(f"{message} instead of step {step}, {list(like.shape)}, {like.dtype}")
            x, *others = [torch.empty_like(like) for _ in range(count)]
            for tensor in (x, *others):
                self._channel.receive_into(_bytes_of(tensor))
            return StageOutput(x, others[0] if others else None)
        return None

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
