"""Messages between worker 0 and the others, and their channel.

Nothing is pickled: decoding can only produce one of the records below, whatever bytes arrive. A message is a frame
(system/frames.py) with one record in MessagePack; the tensors of ``Values`` follow it as raw bytes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from aiakq.quantizers.workers.protocol import Value
from aiakq.system.frames import framed, receive_frame

#: Maximum number of dimensions of a tensor in a message.
_DIMENSIONS = 8


class Job(msgspec.Struct, tag="job"):
    """The first message: what to quantize, and how. A ``Values`` with the calibration samples follows.

    version     version of aiakq, which must equal the worker's.
    checkpoint  folder of the source model.
    files       its ``file_sizes``, which must equal those that the worker sees.
    recipe      ``Recipe.document``.
    spec        the QuantSpec, as JSON values.
    storage     dtype of what is not quantized.
    widths      MLP widths to pad: key of config.json -> (width in the source, width in the output).
    adapter     folder of a LoRA adapter to merge into the weights, and its digest.
    calibrated  whether there are samples.
    budget      bytes of hidden states that this worker may hold in memory.
    scratch     folder for spilled hidden states; empty: a temporary one.
    finished    number of blocks that an earlier run has written.
    threads     number of threads of this worker.
    cpus        processors that this worker may use; empty: all.
    quiet       whether to suppress warnings of libraries, as in this process.
    """

    version: str
    checkpoint: str
    files: dict[str, int]
    recipe: dict[str, Any]
    spec: dict[str, Any]
    storage: str
    widths: dict[str, tuple[int, int]]
    adapter: tuple[str, str] | None
    trust_remote_code: bool
    calibrated: bool
    budget: float
    scratch: str
    finished: int
    quiet: bool
    size: int
    rank: int = 0
    threads: int = 1
    cpus: list[int] = []


class TensorHeader(msgspec.Struct, tag="tensor"):
    """A tensor whose bytes follow."""

    dtype: str
    shape: list[int]


class Values(msgspec.Struct, tag="values"):
    """A list of values. The bytes of its tensors follow in order."""

    items: list[TensorHeader | str | float | int | bool | None]


class WorkerAlive(msgspec.Struct, tag="alive"):
    """A heartbeat: the worker has not hung."""


class WorkerFailed(msgspec.Struct, tag="failed"):
    """The error that ended this worker: an entry of the error registry and its fields."""

    id: str
    fields: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(Job | Values | WorkerAlive | WorkerFailed).decode


class WorkerChannel:
    """One end of a stream socket. Several threads may send, one may receive.

    on_receive       called whenever data has arrived.
    on_send_timeout  called when a send exceeds the socket's time limit; it raises to give up.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_receive: Callable[[], None] | None = None,
        on_send_timeout: Callable[[], None] | None = None,
    ) -> None:
        self.socket = sock
        self._on_receive = on_receive or (lambda: None)
        self._on_send_timeout = on_send_timeout or (lambda: None)
        self._sending = threading.Lock()

    def send(self, record: Job | WorkerAlive | WorkerFailed) -> None:
        """Send one record. Raises OSError if the other end is gone."""
        with self._sending:
            self._send_all(memoryview(framed(_encoder.encode(record))))

    def send_values(self, values: list[Value]) -> None:
        """Send a list of values. Raises OSError if the other end is gone."""
        tensors = [value.detach().cpu().contiguous() for value in values if isinstance(value, Tensor)]
        items = [_header(value) if isinstance(value, Tensor) else value for value in values]
        with self._sending:
            self._send_all(memoryview(framed(_encoder.encode(Values(items)))))
            for tensor in tensors:
                self._send_all(_bytes_of(tensor))

    def receive(self) -> Job | WorkerAlive | WorkerFailed | list[Value] | None:
        """Return the next message; None if the other end is gone. Raises ValueError for an invalid message."""
        try:
            body = receive_frame(self.socket)
            self._on_receive()
            if body is None:
                return None
            record = _decode(body)
            if not isinstance(record, Values):
                return record
            return [self._tensor(item) if isinstance(item, TensorHeader) else item for item in record.items]
        except (ConnectionError, EOFError):
            return None

    def _send_all(self, view: memoryview) -> None:
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                self._on_send_timeout()

    def _tensor(self, header: TensorHeader) -> Tensor:
        dtype = getattr(torch, header.dtype, None)
        if not isinstance(dtype, torch.dtype) or len(header.shape) > _DIMENSIONS or min(header.shape, default=0) < 0:
            raise ValueError("no tensor that can be received")
        # Tensors created in inference mode could not be modified in place afterwards.
        with torch.inference_mode(False):
            tensor = torch.empty(header.shape, dtype=dtype)
        view = _bytes_of(tensor)
        while view:
            count = self.socket.recv_into(view[: 1 << 24])
            if not count:
                raise EOFError
            self._on_receive()
            view = view[count:]
        return tensor


def _header(tensor: Tensor) -> TensorHeader:
    return TensorHeader(str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor [...]."""
    with torch.inference_mode(False):
        return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
