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

from aiakq.kernels.transfer import copies_on_host, on_device
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
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, step: int, hidden: StageOutput, is_valid: Callable[[], bool] = lambda: True) -> None:
        """Enqueue the hidden states [T, hidden] of a step, which may be overwritten by work that follows.

        On a GPU they are copied after the work launched before, for which only the background thread waits.

        is_valid  called once they are known; if it returns False, they are not sent.
        """
        tensors = [hidden.x] if hidden.residual is None else [hidden.x, hidden.residual]
        message = StageMessage(self.epoch, step, (len(tensors), *hidden.x.shape), hidden.x.element_size())
        copied = copies_on_host(*(each.clone() if each.device.type == "cpu" else each for each in tensors))

        def send() -> None:
            ready = [_bytes_of(each.contiguous()) for each in copied()]
            if is_valid():
                self._channel.send(message, *ready)

        self._queue.put(send)

    def close(self) -> None:
        """Stop the thread and close the connection."""
        self._queue.put(None)
        self._channel.hang_up()
        self._channel.close()

    def _run(self) -> None:
        # Rank 0 detects a lost receiver through its control connection.
        with contextlib.suppress(Disconnected):
            while (send := self._queue.get()) is not None:
                send()


class LinkReceiver:
    """Receives hidden states from the previous stage.

    epoch  epoch of the expected steps; messages of earlier epochs are skipped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = _Link(sock, StageMessage)
        self.epoch = 0

    def receive(self, step: int, like: Tensor, wait: Callable[[], bool]) -> StageOutput | None:
        """Return the hidden states of ``step``, with the shape, dtype and device of ``like`` [T, hidden].

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
            received = [torch.empty(like.shape, dtype=like.dtype) for _ in range(count)]
            for tensor in received:
                self._channel.receive_into(_bytes_of(tensor))
            x, *others = [on_device(tensor, like.device) for tensor in received]
            return StageOutput(x, others[0] if others else None)
        return None

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
