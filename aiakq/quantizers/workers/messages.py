"""Messages between worker 0 and the others, the records of a channel (system/channel.py). Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from aiakq.system.channel import Channel


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
    rotation    ``Rotation.document``, whose tensors follow last; None: not rotated.
    calibrated  whether there are samples, and ``samples`` how many.
    image_kind     ``ImageFeatures.kind`` of calibration images; "" without any.
    image_tensors  how many of their ``ImageFeatures.tensors`` follow the samples.
    budget      bytes of hidden states that this worker may hold in memory.
    scratch     folder for spilled hidden states; empty: a temporary one.
    seed        seed of the tokens that are sampled for the importance of calibration tokens.
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
    rotation: dict[str, Any] | None
    trust_remote_code: bool
    calibrated: bool
    samples: int
    image_kind: str
    image_tensors: int
    budget: float
    scratch: str
    seed: int
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
