"""Operations: the interface, torch reference and implementations of each, and ``Ops``, which selects among them.

``Ops`` is created once per device and dtype when a model is loaded. It binds every layer of the model to the best
implementation of its operation, so that no other code depends on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from aiakq.kernels.ops import (
    activation,
    attention,
    batched,
    dense,
    embedding,
    linear,
    lora,
    norm,
    sampling,
    scaling,
)
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.attention import PagedAttention
from aiakq.kernels.ops.batched import BatchedLinear
from aiakq.kernels.ops.dense import DenseLayer
from aiakq.kernels.ops.embedding import EmbeddingLayer, RowSelection
from aiakq.kernels.ops.linear import LinearLayer, LookupLayer, RotatedLinear, RoundedInputs, ScaledInputs
from aiakq.kernels.ops.lora import AdapterRows, LoraProblem, LoraProduct
from aiakq.kernels.ops.mixtures import MIXTURES, MixtureOps
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.kernels.ops.recurrent import RECURRENT, RecurrentOps
from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.selection import Implementations, Kernel, KernelProblem, Selection, select
from aiakq.kernels.types import (
    ActivationProblem,
    AttentionSpec,
    BatchedProblem,
    DenseProblem,
    EmbeddingProblem,
    LayerCache,
    NormProblem,
    QWeight,
    SamplingProblem,
    ScalingProblem,
)

#: Operation -> its implementations, in order of preference.
REGISTRIES: dict[str, Implementations[Any]] = (
    {
        each.IMPLEMENTATIONS.operation: each.IMPLEMENTATIONS
        for each in (linear, dense, lora, batched, attention, norm, activation, embedding, scaling, sampling)
    }
    | RECURRENT
    | MIXTURES
)


@dataclass(frozen=True)
class Bound:
    """An implementation that layers were bound to; ``kind`` is the scheme of a linear layer, else empty."""

    operation: str
    kind: str
    selection: Selection


@dataclass
class Ops(RecurrentOps, MixtureOps):
    """The operations of one device.

    dtype     dtype of the activations.
    kv_dtype  dtype of keys and values in the cache; None: the dtype of the activations.
    excluded  implementations of linear layers that must not be selected (``--dequantize``).
    exact     see LinearProblem (``--cpu-math exact``).
    uniform   whether results must not depend on the number of ranks (``--tensor-parallel-math exact``).
    bound     number of checkpoint layers bound to each implementation so far.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    excluded: Collection[str] = frozenset()
    exact: bool = True
    uniform: bool = False
    bound: Counter[Bound] = field(default_factory=Counter)
    _selected: dict[tuple[str, KernelProblem], tuple[Selection, Any]] = field(
        default_factory=dict, init=False, repr=False
    )
    _row_multiple: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        self.device_type = self.device.type

    @property
    def row_multiple(self) -> int:
        """Multiple to which the linear layers bound so far need the number of rows padded; see ops/linear.py."""
        return self._row_multiple

    def linear(self, weight: QWeight, count: int = 1, role: Role = GATHERED) -> LinearLayer:
        """Bind a linear layer with a quantized weight, which replaces ``count`` checkpoint layers. ``role`` matters on
        tensor-parallel ranks only.
        """
        return self._linear(weight, count, weight.n)

    def _linear(self, weight: QWeight, count: int, uncut_n: int, scheme: str = "") -> LinearLayer:
        """Bind a weight [N, K], which is a whole layer with ``uncut_n`` outputs or a rank's shard of one; ``scheme`` is
        that of the layer around it, if any.
        """
        if weight.rotated:
            return RotatedLinear(self._linear(replace(weight, rotated=False), count, uncut_n))
        if weight.factors is not None:
            factors = weight.factors.to(self.device, self.dtype)
            return ScaledInputs(self._linear(replace(weight, factors=None), count, uncut_n), factors)
        inner = weight.without_rounding()
        if inner is not None:
            scale = None if weight.input_scale is None else weight.input_scale.to(self.device)
            return RoundedInputs(self._linear(inner, count, uncut_n, weight.scheme), scale, weight.rounding)
        problem = weight.problem(self.dtype, self.device_type, self.exact, uncut_n if self.uniform else 0)
        module = self._bind(linear.IMPLEMENTATIONS, problem, scheme or weight.scheme, count)
        return module.prepare(
            weight.to(self.device) if _reads_blocks(module) else weight.unpacked.to(self.device), problem
        )

    def quantized_embedding(self, weight: QWeight, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None] | None:
        """Bind the lookup of rows of a quantized weight [V, D], and if ``tied`` the output layer of the same weight.

        Returns None if the device's implementation has no such lookup: then rows are to be decoded at load.
        """
        if not self._looks_up_rows(weight):
            return None
        embedding, layer = self._lookup(weight, tied, weight.n)
        return embedding, layer if tied else None

    def _looks_up_rows(self, weight: QWeight) -> bool:
        problem = weight.problem(self.dtype, self.device_type, self.exact, 0)
        _, module = self._select(linear.IMPLEMENTATIONS, problem)
        return isinstance(module, linear.RowLookup) and module.looks_up_rows(weight, problem)

    def _lookup(self, weight: QWeight, tied: bool, uncut_n: int) -> tuple[EmbeddingLayer, LinearLayer]:
        """Bind a weight of which rows are looked up, as an output layer, too, if it is ``tied``; see ``_linear``."""
        layer: LinearLayer
        if tied:
            layer = self._linear(weight, 1, uncut_n)
        else:
            problem = weight.problem(self.dtype, self.device_type, self.exact, 0)
            layer = self._select(linear.IMPLEMENTATIONS, problem)[1].prepare(weight, problem)
        assert isinstance(layer, LookupLayer)
        return layer.embedding(self.dtype), layer

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1, role: Role = GATHERED) -> DenseLayer:
        """Bind a linear layer with a float weight [N, K] and bias [N]; ``count`` and ``role`` as in ``linear``."""
        n, k = weight.shape
        problem = DenseProblem(n, k, weight.dtype, self.dtype, self.device_type)
        module = self._bind(dense.IMPLEMENTATIONS, problem, "w16", count)
        bias = None if bias is None else bias.to(self.device)
        return module.prepare(weight.to(self.device), bias, problem)

    def float_dense(self, weight: Tensor) -> DenseLayer:
        """Bind a linear layer with a weight [N, K], whose inputs and outputs are float32 whatever the activations are.
        Every tensor-parallel rank has all of it.
        """
        n, k = weight.shape
        problem = DenseProblem(n, k, torch.float32, torch.float32, self.device_type)
        module = self._bind(dense.IMPLEMENTATIONS, problem, "w16")
        return module.prepare(weight.to(self.device, torch.float32), None, problem)

    def lora(
        self, n: int, k: int, rows: AdapterRows, slots: int, max_rank: int, bias: Tensor | None = None
    ) -> LoraProduct:
        """Bind the LoRA product of a linear layer with ``bias`` [N]; ``rows`` map rows to adapters; see LoraProblem."""
        problem = LoraProblem(n, k, slots, max_rank, self.dtype, self.device_type)
        return self._bind(lora.IMPLEMENTATIONS, problem).prepare(problem, rows, bias)

    def batched(self, weight: Tensor) -> BatchedLinear:
        """Bind a batch of linear layers with float weights [B, N, K], each applied to its own columns."""
        batch, n, k = weight.shape
        problem = BatchedProblem(batch, n, k, weight.dtype, self.dtype, self.device_type)
        return self._bind(batched.IMPLEMENTATIONS, problem).prepare(weight.to(self.device), problem)

    def rms_norm(self, weight: Tensor, epsilon: float) -> Norm:
        """Bind an RMS norm with ``weight`` [D]."""
        return self._norm("rms", weight, None, epsilon)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> Norm:
        """Bind a layer norm with ``weight`` [D] and optional ``bias`` [D]."""
        return self._norm("layer", weight, bias, epsilon)

    def _norm(self, kind: str, weight: Tensor, bias: Tensor | None, epsilon: float) -> Norm:
        problem = NormProblem(kind, weight.shape[0], self.dtype, self.device_type)
        return self._bind(norm.IMPLEMENTATIONS, problem).prepare(weight, bias, epsilon, problem)

    def activation(self, function: str) -> Activation:
        """Bind an activation function, a key of FUNCTIONS in ops/activation.py."""
        problem = ActivationProblem(function, self.dtype, self.device_type)
        return self._bind(activation.IMPLEMENTATIONS, problem).prepare(problem)

    def scaling(self, scale: float = 1.0, cap: float | None = None, factors: Tensor | None = None) -> Scaling:
        """Bind softcap(scale * x) + added; ``factors`` [positions] float32 also scale each row by its position."""
        problem = ScalingProblem(self.dtype, self.device_type)
        return self._bind(scaling.IMPLEMENTATIONS, problem).prepare(scale, cap, factors, problem)

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """Bind the lookup in ``table`` [V, D], which keeps its dtype; rows are returned in the activations' dtype."""
        problem = EmbeddingProblem(table.dtype, self.dtype, self.device_type)
        return self._bind(embedding.IMPLEMENTATIONS, problem).prepare(table.to(self.device), problem)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[EmbeddingLayer, DenseLayer]:
        """Bind the embedding of ``table`` [V, D] and the output layer of the same weight, with ``bias`` [V]."""
        head = self.dense(table, bias)
        rows = head.embedding()
        return self.embedding(rows) if isinstance(rows, Tensor) else rows, head

    def row_selection(self) -> RowSelection:
        """Bind the selection of rows of activations by index."""
        problem = EmbeddingProblem(self.dtype, self.dtype, self.device_type)
        return self._bind(embedding.IMPLEMENTATIONS, problem).row_selection(problem)

    def attention(
        self, spec: AttentionSpec, inputs: Sequence[LinearLayer] = (), output: LinearLayer | None = None
    ) -> PagedAttention:
        """Bind the attention of one layer, between the projections ``inputs`` and ``output``, by whose roles ranks
        split it.
        """
        problem = spec.problem(self.dtype, self.kv_dtype or self.dtype, self.device_type)
        return self._bind(attention.IMPLEMENTATIONS, problem).prepare(spec, problem)

    def new_cache(self, spec: AttentionSpec, pages: int, page_size: int) -> LayerCache:
        """Allocate the zero-initialized KV cache of one layer in the layout of its attention implementation."""
        problem = spec.problem(self.dtype, self.kv_dtype or self.dtype, self.device_type)
        _, module = self._select(attention.IMPLEMENTATIONS, problem)
        return module.new_cache(problem, pages, page_size, self.device)

    def cache_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """Return the bytes per token of one layer's keys and values in a cache of ``dtype``."""
        return spec.cache_bytes(dtype)

    def sampler(self) -> Sampler:
        """Bind a sampler of tokens from float32 logits. Raises PluginError for one of a package that does not fit."""
        problem = SamplingProblem(torch.float32, self.device_type)
        sampler = self._bind(sampling.IMPLEMENTATIONS, problem).prepare(problem)
        selection, _ = self._select(sampling.IMPLEMENTATIONS, problem)
        if sampling.IMPLEMENTATIONS.package(selection.name) is not None and self.device.type != "meta":
            sampling.check_plugin(selection.name, sampler, self.device)
        return sampler

    def selected(self, operation: str) -> set[str]:
        """Return the names of the implementations that layers of ``operation`` were bound to."""
        return {bound.selection.name for bound in self.bound if bound.operation == operation}

    def of_packages(self) -> set[str]:
        """Return the names of plugin implementations that layers, other than samplers, were bound to."""
        names = {(bound.operation, bound.selection.name) for bound in self.bound if bound.operation != "sampling"}
        return {name for operation, name in names if REGISTRIES[operation].package(name) is not None}

    def select(self, operation: str, problem: KernelProblem) -> tuple[Selection, Any]:
        """Select the implementation for ``problem`` and return it with its module, without binding a layer."""
        return self._select(REGISTRIES[operation], problem)

    def _select(self, implementations: Implementations[Kernel], problem: KernelProblem) -> tuple[Selection, Kernel]:
        operation = implementations.operation
        selected: tuple[Selection, Kernel] | None = self._selected.get((operation, problem))
        if selected is None:
            excluded = self.excluded if operation in ("linear", "dense") else ()
            selected = self._selected[operation, problem] = select(implementations, problem, excluded)
        return selected

    def _bind(
        self, implementations: Implementations[Kernel], problem: KernelProblem, kind: str = "", count: int = 1
    ) -> Kernel:
        selection, module = self._select(implementations, problem)
        operation = implementations.operation
        self.bound[Bound(operation, kind, selection)] += count
        if operation in ("linear", "dense", "batched") and self.device_type == "cpu":
            self._row_multiple = max(self._row_multiple, getattr(module, "ROW_MULTIPLE", linear.ROW_MULTIPLE))
        return module


def _reads_blocks(module: object) -> bool:
    """Whether an implementation of linear layers takes a BlockWeight or WordWeight as it is."""
    return bool(getattr(module, "READS_BLOCKS", False))


class PlannedOps(Ops):
    """Selects and records implementations as ``ops`` would, but prepares no layer.

    Tensors are on the meta device and layers cannot be called. Used to inspect a model without its weights.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(torch.device("meta"), ops.dtype, ops.kv_dtype, ops.excluded, ops.exact, ops.uniform)
        self.device_type = ops.device_type

    def _bind(
        self, implementations: Implementations[Kernel], problem: KernelProblem, kind: str = "", count: int = 1
    ) -> Kernel:
        super()._bind(implementations, problem, kind, count)
        return cast(Kernel, _NotPrepared())


class _NotPrepared:
    """Stands in for an implementation's module and for the layers it would prepare."""

    def prepare(self, *arguments: object) -> Any:
        return self

    row_selection = embedding = prepare
