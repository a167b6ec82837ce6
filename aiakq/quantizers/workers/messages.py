"""Messages between worker 0 and the others.

They are the records of a channel (system/channel.py); the tensors of ``Values`` follow it as raw bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from aiakq.quantizers.workers.protocol import Value
from aiakq.system.channel import Channel, Disconnected

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


ToWorker = Job | Values
#: Worker 0's end of a channel, and the other worker's.
FirstChannel = Channel[ToWorker, Values]
WorkerChannel = Channel[Values, ToWorker]


def send_values(channel: FirstChannel | WorkerChannel, values: list[Value]) -> None:
    """Send a list of values. Raises ``Disconnected``."""
    tensors = [value.detach().cpu().contiguous() for value in values if isinstance(value, Tensor)]
    items = [_header(value) if isinstance(value, Tensor) else value for value in values]
    channel.send(Values(items), *map(_bytes_of, tensors))


def receive_values(channel: FirstChannel | WorkerChannel) -> list[Value]:
    """Return the next list of values.

    Raises ``Disconnected``, ValueError for an invalid message, and the error of the other end.
    """
    record = channel.receive()
    if record is None:
        raise Disconnected
    assert isinstance(record, Values), "a job is the first message only"
    return values_of(channel, record)


def values_of(channel: FirstChannel | WorkerChannel, record: Values) -> list[Value]:
    """Receive the tensors of ``record`` and return its values. Raises ``Disconnected`` and ValueError."""
    return [_tensor(channel, item) if isinstance(item, TensorHeader) else item for item in record.items]


def _tensor(channel: FirstChannel | WorkerChannel, header: TensorHeader) -> Tensor:
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(header.shape) > _DIMENSIONS or min(header.shape, default=0) < 0:
        raise ValueError("no tensor that can be received")
    # Tensors created in inference mode could not be modified in place afterwards.
    with torch.inference_mode(False):
        tensor = torch.empty(header.shape, dtype=dtype)
    channel.receive_into(_bytes_of(tensor))
    return tensor


def _header(tensor: Tensor) -> TensorHeader:
    return TensorHeader(str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor [...]."""
    with torch.inference_mode(False):
        return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
