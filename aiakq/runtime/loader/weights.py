"""Weight sources of a model: a checkpoint, or random numbers (``--load-format dummy``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.ops.sharded import Collective, ShardedOps
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.device import DTYPES
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory, release_memory
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.loader.binding import LinearBuilder
from aiakq.runtime.loader.required import check_inventory
from aiakq.spec import LayerSpec, QuantSpec

#: A layer's name, and how many outputs it has.
Part = tuple[str, int]
#: Weights that are prepared before the memory this took is released; more often costs time.
_RELEASE_EVERY = 30_000_000


class CheckpointWeights(LinearBuilder):
    """The ``Weights`` a family builds itself from, read from a checkpoint.

    remarks  what a user should know about the file, once each.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        super().__init__(ops)
        self.checkpoint = checkpoint
        self.remarks: list[str] = []
        self._prepared = 0

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[*shape] in ``dtype`` or the activation dtype, on the device. Raises ``tensor_mismatch``."""
        return self._stored(name, *shape).to(device=self.ops.device, dtype=dtype or self.ops.dtype)

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """[N, K] in the dtype it is stored in, a quantized one in the activation dtype. Raises ``tensor_mismatch``."""
        if self.checkpoint.locate_linear(name) is None:
            return self._stored(f"{name}.weight", n, k)
        return dequantize(self._quantized(name, n, k), self.ops.dtype)

    def _stored(self, name: str, *shape: int) -> Tensor:
        """The tensor in the dtype it is stored in."""
        source = self.checkpoint.locate(name)
        if source is None:
            raise error("tensor_mismatch", path=self.checkpoint.path, reason=f"the tensor {name} is missing")
        found = tuple(self.checkpoint.inventory[source].shape)
        if found != shape:
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} has the shape {list(found)}, config.json says {list(shape)}",
            )
        return self.checkpoint.tensor(source)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False, rows: Tensor | None = None) -> LinearLayer:
        """A layer [N, K]; ``rows`` [N] int64 are the stored rows in the order of its outputs."""
        layer = self._read([(name, n)], k, bias, rows)
        self._count(n * k)
        return layer

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> LinearLayer:
        layer = self._read(parts, k, bias)
        self._count(k * sum(n for _, n in parts))
        return layer

    def _count(self, prepared: int) -> None:
        self._prepared += prepared
        if self._prepared > _RELEASE_EVERY:
            # The file's pages that were read, and freed memory of the heap.
            self.checkpoint.close()
            release_memory()
            self._prepared = 0

    def _read(self, parts: Sequence[Part], k: int, bias: bool, rows: Tensor | None = None) -> LinearLayer:
        sources = [self.checkpoint.locate_linear(name) for name, _ in parts]
        if all(source is None for source in sources):
            weight = _one([self._stored(f"{name}.weight", n, k) for name, n in parts])
            biases = _one([self._stored(f"{name}.bias", n) for name, n in parts]) if bias else None
            if rows is not None:
                weight, biases = weight[rows], None if biases is None else biases[rows]
            return self.dense(weight, biases, len(parts))
        if all(source is not None for source in sources):
            weights = [self._quantized(name, n, k) for name, n in parts]
            return self.quantized(weights if rows is None else [each.with_rows(rows) for each in weights])
        return ConcatLinear([self._read([part], k, bias) for part in parts])

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None]:
        return self.embedding_of(self._stored(name, vocab, width), tied)

    def _quantized(self, name: str, n: int, k: int) -> QWeight:
        source = self.checkpoint.locate_linear(name)
        assert source is not None, name
        weight = self.checkpoint.read_linear(source)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        if not self.remarks:
            remark = formats.remark(self.checkpoint.layout(source), weight, source)
            self.remarks += [remark] if remark else []
        return weight


class DummyWeights(LinearBuilder):
    """Random ``Weights`` of the right shapes, quantized where the config says so; for benchmarks of shapes.

    The same for the same seed and device.
    """

    def __init__(self, config: EngineConfig, collective: Collective | None = None) -> None:
        super().__init__(operations(config, False, collective))
        self.remarks: list[str] = []
        self.spec = config.spec
        self.stored = DTYPES.get(
            str(config.model.raw.get("dtype") or config.model.raw.get("torch_dtype")), config.device.dtype
        )
        # Drawn on the device: the CPU would take half a minute for a model of 8 B.
        self.generator = torch.Generator(config.device.device).manual_seed(config.load.seed)
        self._codes = torch.Generator(config.device.device).manual_seed(config.load.seed)

    def has(self, name: str) -> bool:
        return False  # families then ask for the usual names

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[*shape] in ``dtype`` or the activation dtype, on the device: ones for norms, else N(0, 1 / shape[-1])."""
        return self._random(name, *shape).to(device=self.ops.device, dtype=dtype or self.ops.dtype)

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """[N, K] in the dtype that config.json says, or in the activation dtype where the layer is quantized."""
        spec = None if self.spec is None else self.spec.for_layer(name)
        if spec is None:
            return self._random(f"{name}.weight", n, k)
        return dequantize(random_weight(spec, n, k, None, self.ops.device, self._codes), self.ops.dtype)

    def _random(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return (
            torch.randn(shape, generator=self.generator, device=self.generator.device)
            .mul_(shape[-1] ** -0.5)
            .to(self.stored)
        )

    def linear(self, name: str, n: int, k: int, *, bias: bool = False, rows: Tensor | None = None) -> LinearLayer:
        """A layer [N, K]; ``rows`` [N] do not matter to random ones."""
        return self.stacked([(name, n)], k, bias=bias)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> LinearLayer:
        specs = [None if self.spec is None else self.spec.for_layer(name) for name, _ in parts]
        if any(spec != specs[0] for spec in specs):
            return ConcatLinear([self.linear(name, n, k, bias=bias) for name, n in parts])
        biases = [self._random(f"{name}.bias", n) for name, n in parts] if bias else None
        joined = None if biases is None else _one(biases)
        if specs[0] is not None:
            n = sum(n for _, n in parts)
            return self.ops.linear(random_weight(specs[0], n, k, joined, self.ops.device, self._codes), len(parts))
        return self.dense(_one([self._random(f"{name}.weight", n, k) for name, n in parts]), joined, len(parts))

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None]:
        return self.embedding_of(self._random(name, vocab, width), tied)


def random_weight(
    spec: QuantSpec | LayerSpec, n: int, k: int, bias: Tensor | None, device: torch.device, generator: torch.Generator
) -> QWeight:
    """A weight [N, K] of uniformly random codes, with scales such that outputs are as large as inputs.

    bias  [N] float or None. ``generator`` is on ``device``.
    """
    size = k if spec.group_size == -1 else spec.group_size
    levels, groups = 2**spec.bits, -(-k // size)
    codes = torch.randint(0, levels, (n, k), dtype=torch.uint8, device=device, generator=generator)
    return QWeight(
        scheme="w8a8" if spec.activation_bits else f"w{spec.bits}a16",
        codes=codes,
        scales=torch.full((n, groups), (12 / k) ** 0.5 / levels, dtype=torch.float16, device=device),
        zeros=None if spec.symmetric else torch.full_like(codes[:, :groups], levels // 2),
        bias=bias,
        group_size=size,
    )


def _one(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


#: Implementations that compute on quantized weights: not with ``--dequantize always``.
QUANTIZED = frozenset({"cpu", "triton", "triton-w8a8"})


def weights_for(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights | DummyWeights:
    """The weights that ``config`` asks for: random ones, or the checkpoint's. Raises ``tensor_inventory``.

    collective  of the ranks over which the model is distributed.
    """
    if config.load.load_format == "dummy":
        return DummyWeights(config, collective)
    weights = open_weights(config, collective)
    check_inventory(config.model, weights.checkpoint)
    return weights


def open_weights(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights:
    """The checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    load = config.load
    checkpoint = Checkpoint.open(load.path, load.load_format, load.ignore_patterns, config.model.raw)
    checkpoint.mapped = True
    return CheckpointWeights(checkpoint, operations(config, _may_dequantize(config, checkpoint), collective))


def operations(config: EngineConfig, may_dequantize: bool = False, collective: Collective | None = None) -> Ops:
    """The operations of the device of ``config``, those of one rank with a ``collective``.

    may_dequantize  whether the memory is there for it.
    """
    excluded = frozenset() if may_dequantize else frozenset({"dequantized"})
    if config.load.dequantize == "always":
        excluded = QUANTIZED
    device = config.device
    ops = Ops(device.device, device.dtype, config.cache.dtype, excluded, config.load.cpu_math == "exact")
    return ops if collective is None else ShardedOps(ops, collective)


def _may_dequantize(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    if config.load.dequantize != "auto" or config.spec is None:
        return config.load.dequantize != "never"
    expanded = 0.0
    for prefix in checkpoint.quantized_linears():
        # The codes are the largest tensor. A config that is wrong about their width makes this estimate rough, no more.
        info = max(checkpoint.linear_headers(prefix).values(), key=lambda info: info.nbytes)
        bits = 8 if info.dtype == "I8" else checkpoint.linear_spec(prefix).bits
        expanded += info.nbytes * 8 / bits * config.device.dtype.itemsize
    return expanded < 0.25 * free_memory(config.device.device)
