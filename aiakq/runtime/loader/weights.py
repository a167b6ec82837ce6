"""Where a model's tensors come from: a checkpoint, bound to kernels layer by layer, or random numbers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import RequiredTensors, compare, refusal
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.device import DTYPES
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.device_memory import free_memory, release_memory
from aiakq.runtime.layers.linear import AnyLinear, Embedding, Linear, SideBySide
from aiakq.runtime.loader.binding import Binder, Kinds, stacked
from aiakq.runtime.models import ARCHITECTURES
from aiakq.spec import LayerSpec, QuantSpec

#: A layer's name, and how many outputs it has.
Part = tuple[str, int]
#: Weights that are brought into a kernel's layout before what that took is given back; more often costs time.
_GIVE_BACK_EVERY = 30_000_000


class CheckpointWeights(Binder):
    """The ``Weights`` a family builds itself from, read from a checkpoint.

    remarks  what a user should know about the file, once each.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        excluded: frozenset[str] = frozenset(),
        exact: bool = True,
    ) -> None:
        super().__init__(dtype, device, excluded, exact)
        self.checkpoint = checkpoint
        self.remarks: list[str] = []
        self._arranged = 0

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._stored(name, *shape).to(device=self.device, dtype=self.dtype)

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

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        return self.stacked([(name, n)], k, bias=bias)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> AnyLinear:
        layer = self._read(parts, k, bias)
        self._arranged += k * sum(n for _, n in parts)
        if self._arranged > _GIVE_BACK_EVERY:
            # Pages of the file that was read, and the heap's.
            self.checkpoint.close()
            release_memory()
            self._arranged = 0
        return layer

    def _read(self, parts: Sequence[Part], k: int, bias: bool) -> AnyLinear:
        sources = [self.checkpoint.locate_linear(name) for name, _ in parts]
        if all(source is None for source in sources):
            weights = [self._stored(f"{name}.weight", n, k) for name, n in parts]
            biases = [self._stored(f"{name}.bias", n) for name, n in parts] if bias else None
            return self.dense(_one(weights), None if biases is None else _one(biases), len(parts))
        if all(source is not None for source in sources):
            found = [self._quantized(name, n, k) for name, n in parts]
            whole = found[0] if len(found) == 1 else stacked(found)
            if whole is not None:
                return self.bound(whole, len(parts))
            return SideBySide([self.bound(weight) for weight in found])
        return SideBySide([self._read([part], k, bias) for part in parts])

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        return self.embedded(self._stored(name, vocab, width), tied)

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


class _Endless(Exception):
    pass


@dataclass
class WantedWeights:
    """``Weights`` that hold nothing and note what a family asks for; ``limit`` ends configs of absurd sizes.

    checkpoint  only asked which names it has.
    """

    checkpoint: Checkpoint
    limit: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("meta")
    wanted: RequiredTensors = field(default_factory=RequiredTensors)

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.wanted.tensors[name] = shape
        self._count()
        if max(shape) >= 2**31 or (len(shape) > 2 and shape[0] > self.limit):
            raise _Endless
        return torch.empty((), dtype=self.dtype, device="meta").expand(shape)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        self.wanted.linears[name] = (n, k, bias)
        self._count()
        return Linear(torch.empty((), dtype=self.dtype, device="meta").expand(n, k))

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> AnyLinear:
        for name, n in parts:
            self.linear(name, n, k, bias=bias)
        return Linear(torch.empty((), dtype=self.dtype, device="meta").expand(sum(n for _, n in parts), k))

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> AnyLinear:
        return Linear(weight, bias)

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        table = self.tensor(name, vocab, width)
        return Embedding(table, self.dtype), Linear(table) if tied else None

    def _count(self) -> None:
        if len(self.wanted.tensors) + len(self.wanted.linears) > self.limit:
            raise _Endless


def wanted_tensors(config: ModelConfig, checkpoint: Checkpoint) -> RequiredTensors:
    """What the native family of ``config`` needs, by building it without weights. Raises ``model_*``."""
    # Room for what a truncated file lacks, and no more: a config may claim a billion layers.
    weights = WantedWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    build = importlib.import_module(ARCHITECTURES[config.architecture]).build
    try:
        build(config, weights)
    except (_Endless, RuntimeError):
        pass  # whatever was noted so far is enough to refuse it
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as problem:
        reason = f"{type(problem).__name__}: {problem}"  # a value of the config that is of another kind than it should
        raise error("model_malformed", file="config.json", reason=reason[:200]) from problem
    return weights.wanted


def check_inventory(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare a checkpoint with what its config implies, before any weight is read. Raises ``tensor_inventory``."""
    problem = refusal(str(checkpoint.path), compare(checkpoint, wanted_tensors(config, checkpoint)))
    if problem is not None:
        raise problem


class DummyWeights(Binder):
    """Random ``Weights`` of the right shapes, quantized where the config says so; for benchmarks of shapes.

    The same for the same seed and device.
    """

    def __init__(self, config: EngineConfig) -> None:
        excluded = NOT_WHEN_DEQUANTIZED if config.load.dequantize == "always" else frozenset({"dequantized"})
        super().__init__(config.device.dtype, config.device.device, excluded, config.load.cpu_math == "exact")
        self.spec = config.spec
        self.stored = DTYPES.get(
            str(config.model.raw.get("dtype") or config.model.raw.get("torch_dtype")), config.device.dtype
        )
        self.generator = torch.Generator().manual_seed(config.load.seed)
        self._codes = torch.Generator(config.device.device).manual_seed(config.load.seed)

    def has(self, name: str) -> bool:
        return False  # what is asked for with tensor() there is, under the usual names

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._made(name, *shape).to(device=self.device, dtype=self.dtype)

    def _made(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=self.generator).mul_(shape[-1] ** -0.5).to(self.stored)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        return self.stacked([(name, n)], k, bias=bias)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> AnyLinear:
        specs = [None if self.spec is None else self.spec.for_layer(name) for name, _ in parts]
        if any(spec != specs[0] for spec in specs):
            return SideBySide([self.linear(name, n, k, bias=bias) for name, n in parts])
        biases = [self._made(f"{name}.bias", n) for name, n in parts] if bias else None
        joined = None if biases is None else _one(biases)
        if specs[0] is not None:
            n = sum(n for _, n in parts)
            return self.bound(random_weight(specs[0], n, k, joined, self.device, self._codes), len(parts))
        return self.dense(_one([self._made(f"{name}.weight", n, k) for name, n in parts]), joined, len(parts))

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        return self.embedded(self._made(name, vocab, width), tied)


def random_weight(
    spec: QuantSpec | LayerSpec, n: int, k: int, bias: Tensor | None, device: torch.device, draw: torch.Generator
) -> QWeight:
    """Codes that are all equally likely, with scales such that outputs are as large as inputs."""
    size = k if spec.group_size == -1 else spec.group_size
    levels, groups = 2**spec.bits, -(-k // size)
    codes = torch.randint(0, levels, (n, k), dtype=torch.uint8, device=device, generator=draw)
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


#: Implementations that would compute on quantized weights.
NOT_WHEN_DEQUANTIZED = frozenset({"cpu", "triton", "triton-w8a8"})


def open_weights(config: EngineConfig) -> CheckpointWeights:
    """The checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    checkpoint = Checkpoint.open(
        config.load.path, config.load.load_format, config.load.ignore_patterns, config.model.raw
    )
    excluded = set() if _may_dequantize(config, checkpoint) else {"dequantized"}
    if config.load.dequantize == "always":
        excluded = set(NOT_WHEN_DEQUANTIZED)
    return CheckpointWeights(
        checkpoint, config.device.dtype, config.device.device, frozenset(excluded), config.load.cpu_math == "exact"
    )


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


def describe_kinds(kinds: Kinds) -> str:
    """One line like ``42 x w4a16: dequantized; 1 x w16: torch``, with the reasons why nothing better was taken."""
    parts = []
    for (scheme, name, passed_over), count in sorted(kinds.items(), key=lambda item: -item[1]):
        reasons = "".join(f" ({other}: {reason})" for other, reason in passed_over)
        parts.append(f"{count} x {scheme}: {name}{reasons}")
    return "; ".join(parts)
