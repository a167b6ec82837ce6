"""Links: connected stream sockets that carry hidden states from one pipeline stage to the next.

A message is a header and the bytes of one or two tensors. The epoch in the header increases when steps are abandoned,
so that the receiver can skip messages of abandoned steps.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from aiakq.runtime.models.interface import StageOutput
from aiakq.system.channel import receive_exactly

#: Epoch, number of the step, rows, columns, bytes per value, number of tensors.
_HEADER = struct.Struct("<QQIIII")


class LinkSender:
    """Sends hidden states to the next stage from a background thread, so that steps do not wait for the receiver.

    epoch  epoch of the steps being sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.epoch = 0
        self._socket = sock
        self._queue: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, step: int, hidden: StageOutput) -> None:
        """Enqueue the hidden states [T, hidden] of a step; they are copied before this returns."""
        tensors = [hidden.x] if hidden.residual is None else [hidden.x, hidden.residual]
        rows, columns = hidden.x.shape
        header = _HEADER.pack(self.epoch, step, rows, columns, hidden.x.element_size(), len(tensors))
        self._queue.put([header, *(_as_bytes(tensor) for tensor in tensors)])

    def close(self) -> None:
        """Stop the thread and close the connection."""
        self._queue.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        # Rank 0 detects a lost receiver through its control connection.
        with contextlib.suppress(OSError):
            while (parts := self._queue.get()) is not None:
                for part in parts:
                    self._socket.sendall(part)


class LinkReceiver:
    """Receives hidden states from the previous stage.

    epoch  epoch of the expected steps; messages of earlier epochs are skipped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.epoch = 0

    def receive(self, step: int, like: Tensor, wait: Callable[[], bool]) -> StageOutput | None:
        """Return the hidden states of ``step``, with the shape and dtype of ``like`` [T, hidden].

        wait  blocks until the socket is readable and returns True; if it returns False, this returns None.

        Raises ConnectionError if the sender is gone, ValueError for an unexpected message.
        """
        while wait():
            epoch, number, rows, columns, size, count = _HEADER.unpack(self._read(_HEADER.size))
            if (rows, columns) != tuple(like.shape) or size != like.element_size() or count not in (1, 2):
                if epoch == self.epoch:
                    raise ValueError(f"{count} tensors [{rows}, {columns}] of {size} bytes")
                self._skip(rows * columns * size * count)
                continue
            tensors = [torch.empty_like(like) for _ in range(count)]
            for tensor in tensors:
                self._read_into(memoryview(_as_bytes_view(tensor)))
            if (epoch, number) == (self.epoch, step):
                return StageOutput(tensors[0], tensors[1] if count == 2 else None)
            if epoch == self.epoch:
                raise ValueError(f"step {number} instead of {step}")
        return None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _read(self, count: int) -> bytes:
        received = receive_exactly(self.socket, count)
        if received is None:
            raise ConnectionError("the previous stage closed its connection")
        return received

    def _skip(self, count: int) -> None:
        while count:
            count -= len(self._read(min(count, 1 << 20)))

    def _read_into(self, view: memoryview) -> None:
        while view:
            received = self.socket.recv_into(view)
            if not received:
                raise ConnectionError("the previous stage closed its connection")
            view = view[received:]


def _as_bytes_view(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]


def _as_bytes(tensor: Tensor) -> bytes:
    return bytes(_as_bytes_view(tensor.contiguous().cpu()))
