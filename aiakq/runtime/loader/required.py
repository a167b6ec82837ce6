"""RequiredTensors: the tensors that a model needs, determined by building it without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import RequiredTensors, comparison, refusal
from aiakq.formats.left_out import prediction_layers
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.lora.layers import is_adaptable
from aiakq.runtime.models import family_module, unused_tensors
from aiakq.runtime.models.interface import Model
from aiakq.runtime.models.stage import Stage

#: Names of the output layer for logits, which a pooling model does not need.
OUTPUT_LAYERS = ("lm_head.", "language_model.lm_head.")
#: Name of a layer, and its number of outputs.
Part = tuple[str, int]


class LimitExceeded(Exception):
    """A config requires more or larger tensors than its checkpoint can contain."""


@dataclass
class RequiredWeights:
    """``Weights`` without contents that record the tensors a family uses; ``limit`` stops configs with absurd sizes.

    checkpoint  checkpoint of which only the names are used.
    ops         operations that select implementations but cannot be called.
    modules     linear layers that LoRA adapters may modify: name -> N and K.
    """

    checkpoint: Checkpoint
    limit: int
    stage: Stage | None = None  # the whole model
    ops: PlannedOps = field(default_factory=lambda: PlannedOps(Ops(torch.device("cpu"), torch.float32)))
    required: RequiredTensors = field(default_factory=RequiredTensors)
    modules: dict[str, tuple[int, int]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def has_shape(self, name: str, *shape: int) -> bool:
        source = self.checkpoint.locate(name)
        return source is not None and tuple(self.checkpoint.inventory[source].shape) == shape

    def is_packed(self, name: str) -> bool:
        return self.checkpoint.locate_linear(name) is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a meta tensor [*shape] in ``dtype`` if that is an integer, else in the activation dtype.

        Raises LimitExceeded.
        """
        linear = name.removesuffix(".weight")
        if len(shape) == 2 and linear != name and self.is_packed(linear):
            self.required.linears[linear] = (*shape, False)
        else:
            self.required.tensors[name] = shape
        if dtype is not None and not dtype.is_floating_point:
            self.required.integers.add(name)
        self._count()
        # One layer is built for each expert of a fused tensor, but none for the channels of a convolution, [C, 1, K].
        if max(shape) >= 2**31 or (len(shape) > 2 and shape[1] > 1 and shape[0] > self.limit):
            raise LimitExceeded
        empty = self._empty(*shape)
        return empty.to(dtype) if name in self.required.integers else empty

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """Return the weight [N, K] of a linear layer, without contents."""
        RequiredWeights.linear(self, name, n, k)
        return self._empty(n, k)

    def linear(
        self,
        name: str,
        n: int,
        k: int,
        *,
        bias: bool = False,
        rows: Tensor | None = None,
        role: Role = GATHERED,
    ) -> LinearLayer:
        """Return a layer [N, K] without contents; the order ``rows`` [N] and ``role`` do not matter."""
        self.required.linears[name] = (n, k, bias)
        if is_adaptable(name):
            self.modules[name] = (n, k)
        self._count()
        return TorchDense(self._empty(n, k))

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False, role: Role = GATHERED) -> LinearLayer:
        for name, n in parts:
            self.linear(name, n, k, bias=bias)
        return TorchDense(self._empty(sum(n for _, n in parts), k))

    def packed_experts(self, name: str) -> None:
        """Return None: the tensor ``name`` stands for them."""

    def dense(self, weight: Tensor, bias: Tensor | None = None, *, role: Role = GATHERED) -> LinearLayer:
        """Return a layer with a weight [N, K]."""
        return TorchDense(weight, bias)

    def quantized(self, weights: Sequence[QWeight], role: Role) -> LinearLayer:
        """Return a layer with the shape of ``weights`` [N_i, K] together."""
        return TorchDense(self._empty(sum(weight.n for weight in weights), weights[0].k))

    def adaptable(
        self,
        layer: LinearLayer,
        name: str,
        n: int,
        k: int,
        weight: Callable[[], Tensor],
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """Record the module and return ``layer``. weight [N, K], bias [N]."""
        self.modules[name] = (n, k)
        return layer

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """See Weights: bias [V]."""
        table = self.tensor(name, vocab, width)
        return self.ops.embedding(table), TorchDense(table) if tied else None

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty((), dtype=self.ops.dtype, device="meta").expand(shape)

    def _count(self) -> None:
        if len(self.required.tensors) + len(self.required.linears) > self.limit:
            raise LimitExceeded


def required_tensors(config: ModelConfig, checkpoint: Checkpoint) -> RequiredTensors:
    """Return the tensors that the native family of ``config`` needs. Raises ``model_*``."""
    return build_without_weights(config, checkpoint)[0]


def build_without_weights(
    config: ModelConfig, checkpoint: Checkpoint, ops: PlannedOps | None = None
) -> tuple[RequiredTensors, Model | None]:
    """Build the native model of ``config`` without weights; its layers are recorded in ``ops``.

    Returns the required tensors, and the model, which cannot be called, or None if it is too large for its checkpoint.
    Raises ``model_*``.
    """
    model = None
    # The limit leaves room for the tensors that a truncated file lacks, but not for a config of a billion layers.
    weights = RequiredWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    if ops is not None:
        weights.ops = ops
    build = family_module(config.architecture).build
    try:
        model = build(config, weights)
    except (LimitExceeded, RuntimeError):
        pass  # the tensors recorded so far suffice to refuse it
    except AiakqError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as problem:
        reason = f"{type(problem).__name__}: {problem}"  # a value of the config has the wrong type
        raise error("model_malformed", file="config.json", reason=reason[:200]) from problem
    weights.required.unused = unused_tensors(config.architecture)
    if config.head is not None:
        weights.required.unused += OUTPUT_LAYERS
    weights.required.beside = (
        *prediction_layers(checkpoint.inventory, config.num_layers),
        *_unread_keys(config, checkpoint),
    )
    return weights.required, model


def _unread_keys(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the names of tensors of keys and values that files hold for layers that read those of others."""
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight", "k_proj.bias", "v_proj.bias")
    names = [f"model.layers.{layer}.self_attn.{part}" for layer in config.cache_sources for part in parts]
    return [found for name in names if (found := checkpoint.locate(name)) is not None]


def adaptable_modules(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Return the linear layers of the whole model that LoRA adapters may modify: name -> outputs N and inputs K."""
    weights = RequiredWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    family_module(config.architecture).build(config, weights)
    return weights.modules


def check_inventory(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Compare a checkpoint's tensors with its config before any weight is read; return those that are left out.

    Raises ``tensor_inventory``.
    """
    differences, unused = comparison(checkpoint, required_tensors(config, checkpoint))
    problem = refusal(str(checkpoint.path), differences, checkpoint.unread)
    if problem is not None:
        raise problem
    return unused
