"""Lists of values between worker 0 and the others: a ``Values``, then the bytes of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.quantizers.workers.messages import FirstChannel, TensorHeader, Values, WorkerChannel
from aiakq.quantizers.workers.protocol import Value
from aiakq.system.channel import Disconnected, InvalidMessage

#: Maximum number of dimensions of a tensor in a message.
_DIMENSIONS = 8


def send_values(channel: FirstChannel | WorkerChannel, values: list[Value]) -> None:
    """Send a list of values. Raises ``Disconnected``."""
    tensors = [value.detach().cpu().contiguous() for value in values if isinstance(value, Tensor)]
    items = [_header(value) if isinstance(value, Tensor) else value for value in values]
    channel.send(Values(items), *map(_bytes_of, tensors))


def receive_values(channel: FirstChannel | WorkerChannel) -> list[Value]:
    """Return the next list of values.

    Raises ``Disconnected``, ``InvalidMessage``, and the error of the other end.
    """
    record = channel.receive()
    if record is None:
        raise Disconnected
    assert isinstance(record, Values), "a job is the first message only"
    return values_of(channel, record)


def values_of(channel: FirstChannel | WorkerChannel, record: Values) -> list[Value]:
    """Receive the tensors of ``record`` and return its values. Raises ``Disconnected`` and ``InvalidMessage``."""
    return [_tensor(channel, item) if isinstance(item, TensorHeader) else item for item in record.items]


def _tensor(channel: FirstChannel | WorkerChannel, header: TensorHeader) -> Tensor:
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(header.shape) > _DIMENSIONS or min(header.shape, default=0) < 0:
        raise InvalidMessage("no tensor that can be received")
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
