"""Where a model's tensors come from: a checkpoint, bound to kernels layer by layer, or random numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels import bind
from aiakq.kernels.types import QWeight
from aiakq.runtime.config import EngineConfig
from aiakq.runtime.layers.linear import AnyLinear, Linear, QLinear
from aiakq.runtime.memory import free_memory

#: (scheme, implementation, why each better one was passed over) -> number of layers.
Kinds = Counter[tuple[str, str, tuple[tuple[str, str], ...]]]


@dataclass
class CheckpointWeights:
    """The ``Weights`` a family builds itself from, read from a checkpoint; notes what was used and bound to what.

    excluded  implementations that may not be chosen (see ``--dequantize``).
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    excluded: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set)
    kinds: Kinds = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.quantized = set(self.checkpoint.quantized_linears())
        self.names = self.checkpoint.inventory

    def has(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.names:
            raise error("tensor_mismatch", path=self.checkpoint.path, reason=f"the tensor {name} is missing")
        found = tuple(self.names[name].shape)
        if found != shape:
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{name} has the shape {list(found)}, config.json says {list(shape)}",
            )
        self.used.add(name)
        return self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        if name not in self.quantized:
            self.kinds[("w16", "torch", ())] += 1
            return Linear(self.tensor(f"{name}.weight", n, k), self.tensor(f"{name}.bias", n) if bias else None)
        weight = self.checkpoint.read_linear(name)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{name} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        self.used.update(other for other in self.names if other.startswith(f"{name}."))
        bound = bind(_moved(weight, self.device), weight.problem(self.dtype, self.device), self.excluded)
        self.kinds[(weight.scheme, bound.choice.name, bound.choice.passed_over)] += 1
        return QLinear(bound)

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that no layer asked for; those that can be computed again do not count."""
        ignored = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
        tied = {"lm_head.weight"}
        return sorted(
            name for name in self.names if name not in self.used and name not in tied and not name.endswith(ignored)
        )


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
    packed = sum(
        checkpoint.inventory[name].nbytes
        for prefix in checkpoint.quantized_linears()
        for suffix in ("qweight", "weight_packed", "weight")
        if (name := f"{prefix}.{suffix}") in checkpoint.inventory
    )
    expanded = packed * 8 / config.spec.bits * config.dtype.itemsize
    return expanded < 0.25 * free_memory(config.device)


def describe_kinds(kinds: Kinds) -> str:
    """One line like ``42 x w4a16: dequantized; 1 x w16: torch``, with the reasons why nothing better was taken."""
    parts = []
    for (scheme, name, passed_over), count in sorted(kinds.items(), key=lambda item: -item[1]):
        reasons = "".join(f" ({other}: {reason})" for other, reason in passed_over)
        parts.append(f"{count} x {scheme}: {name}{reasons}")
    return "; ".join(parts)
