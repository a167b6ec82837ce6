"""Compares the size of a model's weights with free memory, before any of them is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory
from aiakq.runtime.loader.dummy_weights import stored_dtype
from aiakq.runtime.loader.required import LimitExceeded, RequiredWeights
from aiakq.runtime.loader.rounding import RoundingAtLoad
from aiakq.runtime.models import family_module, is_native

_FLOATS = ("F32", "F64", "BF16", "F16")
_MAX_TENSORS = 1_000_000


@dataclass
class _NoTensors:
    """Stands for the checkpoint of random weights, which has none."""

    inventory: dict[str, TensorInfo] = field(default_factory=dict)

    def locate(self, name: str) -> str | None:
        return None

    def locate_linear(self, name: str) -> str | None:
        return None


def check_weights_fit(config: EngineConfig, host_ranks: int = 1) -> None:
    """Raise ``weights_too_large`` if the weights exceed the memory that is free.

    host_ranks  ranks that share the memory of this machine.

    What loading takes besides, and the KV cache, is left out: what is refused here cannot be served.
    """
    parallel = config.parallel
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    needed = weight_bytes(config) * host_ranks / ranks
    available = free_memory(config.device.device)
    if needed > available:
        on_gpu = config.device.device.type == "cuda"
        raise error(
            "weights_too_large",
            path=str(config.load.path),
            needed=f"{needed / 2**30:.1f} GiB",
            available=f"{available / 2**30:.1f} GiB",
            where="on the GPU" if on_gpu else "on this machine",
        )


def weight_bytes(config: EngineConfig) -> int:
    """A lower bound of the bytes that the weights take in memory; 0 where that is not known before they are read."""
    if config.load.load_format == "dummy":
        return _dummy_bytes(config)
    load = config.load
    try:
        checkpoint = Checkpoint.open(load.path, load.weights, load.ignore_patterns, config.model.raw)
    except AiakqError:
        return 0  # loading says what is wrong with it
    try:
        left_out = set(checkpoint.beside_text)
        width = config.device.dtype.itemsize
        rounded = {}
        if load.rounds and config.spec is not None:
            bits = config.spec.bits
            counts = RoundingAtLoad(checkpoint, config.spec).weights()
            rounded = {name: count * bits // 8 for name, count in counts.items()}
        served = {name: _served(info, width) for name, info in checkpoint.inventory.items()} | rounded
        return sum(size for name, size in served.items() if name not in left_out)
    finally:
        checkpoint.close()


def _served(info: TensorInfo, width: int) -> int:
    """The bytes of a tensor, no more than ``width`` for each number if they are floating-point numbers."""
    count = math.prod(info.shape)
    return min(info.nbytes, count * width) if info.dtype in _FLOATS else info.nbytes


def _dummy_bytes(config: EngineConfig) -> int:
    if not is_native(config.model.architecture):
        return 0
    weights = RequiredWeights(_NoTensors(), limit=_MAX_TENSORS)  # type: ignore[arg-type]
    try:
        family_module(config.model.architecture).build(config.model, weights)
    except (LimitExceeded, AiakqError, RuntimeError):
        return 0
    width = min(config.device.dtype.itemsize, stored_dtype(config).itemsize)
    total = sum(width * math.prod(shape) for shape in weights.required.tensors.values())
    for name, (n, k, _) in weights.required.linears.items():
        spec = None if config.spec is None else config.spec.for_layer(name)
        total += n * k * width if spec is None else n * k * spec.bits // 8
    return total
