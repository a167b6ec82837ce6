"""Where a model's tensors come from: a checkpoint, bound to kernels layer by layer, or random numbers."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats import gptq
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import Wanted, compare, refusal
from aiakq.kernels import bind
from aiakq.kernels.types import QWeight
from aiakq.runtime.config import EngineConfig, ModelConfig
from aiakq.runtime.layers.linear import AnyLinear, Linear, QLinear
from aiakq.runtime.memory import free_memory
from aiakq.runtime.models import ARCHITECTURES

#: (scheme, implementation, why each better one was passed over) -> number of layers.
Kinds = Counter[tuple[str, str, tuple[tuple[str, str], ...]]]


@dataclass
class CheckpointWeights:
    """The ``Weights`` a family builds itself from, read from a checkpoint; notes what was bound to what.

    excluded  implementations that may not be chosen (see ``--dequantize``).
    remarks   what a user should know about the file, once each.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    excluded: frozenset[str] = frozenset()
    kinds: Kinds = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quantized = set(self.checkpoint.quantized_linears())

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def tensor(self, name: str, *shape: int) -> Tensor:
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
        return self.checkpoint.tensor(source).to(device=self.device, dtype=self.dtype)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        source = self.checkpoint.locate_linear(name)
        if source is None:
            self.kinds[("w16", "torch", ())] += 1
            return Linear(self.tensor(f"{name}.weight", n, k), self.tensor(f"{name}.bias", n) if bias else None)
        weight = self.checkpoint.read_linear(source)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        self._check_zeros(source, weight)
        bound = bind(_moved(weight, self.device), weight.problem(self.dtype, self.device), self.excluded)
        self.kinds[(weight.scheme, bound.choice.name, bound.choice.passed_over)] += 1
        return QLinear(bound)

    def _check_zeros(self, name: str, weight: QWeight) -> None:
        """Remark on asymmetric GPTQ zero points that look off by one: their version may be mislabelled."""
        if self.remarks or self.checkpoint.layout(name) not in ("gptq", "gptq_v2"):
            return
        shift = gptq.zero_shift(weight)
        if abs(shift) > 0.5:
            self.remarks.append(
                f"the weights of {name} lie {shift:+.1f} steps off centre: its zero points may be of the other GPTQ "
                "version than checkpoint_format says"
            )


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
    wanted: Wanted = field(default_factory=Wanted)

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

    def _count(self) -> None:
        if len(self.wanted.tensors) + len(self.wanted.linears) > self.limit:
            raise _Endless


def wanted_tensors(config: ModelConfig, checkpoint: Checkpoint) -> Wanted:
    """What the native family of ``config`` needs, by building it without weights. Raises ``model_*``."""
    # Room for what a truncated file lacks, and no more: a config may claim a billion layers.
    weights = WantedWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    build = importlib.import_module(ARCHITECTURES[config.architecture]).build
    try:
        with torch.device("meta"):  # tables of positions need no memory either
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


@dataclass
class DummyWeights:
    """Random ``Weights`` of the right shapes, the same for the same seed; for benchmarks of shapes."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    kinds: Kinds = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def has(self, name: str) -> bool:
        return False  # what is asked for with tensor() there is, under the usual names

    def tensor(self, name: str, *shape: int) -> Tensor:
        value = torch.randn(shape, generator=self.generator).mul_(shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            value = torch.ones(shape)
        return value.to(device=self.device, dtype=self.dtype)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        self.kinds[("w16", "torch", ())] += 1
        return Linear(self.tensor(name, n, k), self.tensor(name, n) if bias else None)


def _moved(weight: QWeight, device: torch.device) -> QWeight:
    if device.type == "cpu":
        return weight
    moved = {
        name: value.to(device)
        for name in ("codes", "scales", "zeros", "perm", "bias", "input_scale")
        if (value := getattr(weight, name)) is not None
    }
    return replace(weight, **moved)


def open_weights(config: EngineConfig) -> CheckpointWeights:
    """The checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    checkpoint = Checkpoint.open(config.model)
    excluded = frozenset() if _may_dequantize(config, checkpoint) else frozenset({"dequantized"})
    return CheckpointWeights(checkpoint, config.dtype, config.device, excluded)


def _may_dequantize(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    if config.dequantize != "auto" or config.spec is None:
        return config.dequantize != "never"
    expanded = 0.0
    for prefix in checkpoint.quantized_linears():
        # Packed bytes by the layer's own width; a config that lies about it makes this estimate rough, no more.
        info = next(
            checkpoint.inventory[name]
            for suffix in ("qweight", "weight_packed", "weight")
            if (name := f"{prefix}.{suffix}") in checkpoint.inventory
        )
        bits = 8 if info.dtype == "I8" else checkpoint.linear_spec(prefix).bits
        expanded += info.nbytes * 8 / bits * config.dtype.itemsize
    return expanded < 0.25 * free_memory(config.device)


def describe_kinds(kinds: Kinds) -> str:
    """One line like ``42 x w4a16: dequantized; 1 x w16: torch``, with the reasons why nothing better was taken."""
    parts = []
    for (scheme, name, passed_over), count in sorted(kinds.items(), key=lambda item: -item[1]):
        reasons = "".join(f" ({other}: {reason})" for other, reason in passed_over)
        parts.append(f"{count} x {scheme}: {name}{reasons}")
    return "; ".join(parts)
