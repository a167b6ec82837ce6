"""Operations: interface, torch reference and implementations of each, and ``Ops``, which selects among them.

``Ops`` is made once for a device and a dtype when a model is loaded. Every layer of the model is bound through it to
the best implementation of its operation, so nothing has to look at a device afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.ops import (
    activation,
    attention,
    batched,
    dense,
    embedding,
    experts,
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
from aiakq.kernels.ops.experts import ExpertLayers, GroupedExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.lora import AdapterRows, LoraProblem, LoraProduct
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.recurrent import RECURRENT, RecurrentOps
from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.registry import Registry
from aiakq.kernels.selection import Selection, select
from aiakq.kernels.types import (
    ActivationProblem,
    AttentionSpec,
    BatchedProblem,
    DenseProblem,
    EmbeddingProblem,
    ExpertsProblem,
    LayerCache,
    NormProblem,
    QWeight,
    SamplingProblem,
    ScalingProblem,
)

#: Operation -> its implementations, in order of preference.
REGISTRIES: dict[str, Registry] = {
    "linear": linear.IMPLEMENTATIONS,
    "dense": dense.IMPLEMENTATIONS,
    "lora": lora.IMPLEMENTATIONS,
    "batched": batched.IMPLEMENTATIONS,
    "experts": experts.IMPLEMENTATIONS,
    "attention": attention.IMPLEMENTATIONS,
    **RECURRENT,
    "norm": norm.IMPLEMENTATIONS,
    "activation": activation.IMPLEMENTATIONS,
    "embedding": embedding.IMPLEMENTATIONS,
    "scaling": scaling.IMPLEMENTATIONS,
    "sampling": sampling.IMPLEMENTATIONS,
}


@dataclass(frozen=True)
class Bound:
    """What layers of one kind were bound to: ``kind`` is the scheme of a linear layer, else empty."""

    operation: str
    kind: str
    selection: Selection


@dataclass
class Ops(RecurrentOps):
    """The operations of one device.

    dtype     of the activations.
    kv_dtype  of keys and values in the cache; None: as the activations.
    excluded  implementations of linear layers that may not be selected (``--dequantize``).
    exact     see LinearProblem (``--cpu-math exact``).
    uniform   whether results have to be those of any number of ranks that gather (``--tensor-parallel-math exact``).
    bound     what was bound so far -> number of the checkpoint's layers.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    excluded: Collection[str] = frozenset()
    exact: bool = True
    uniform: bool = False
    bound: Counter[Bound] = field(default_factory=Counter)
    _selected: dict[Any, tuple[Selection, ModuleType]] = field(default_factory=dict, init=False, repr=False)
    _row_multiple: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        self.device_type = self.device.type

    @property
    def row_multiple(self) -> int:
        """Rows of activations come in multiples of this for the linear layers bound so far; see ops/linear.py."""
        return self._row_multiple

    def linear(self, weight: QWeight, count: int = 1) -> LinearLayer:
        """A linear layer of a quantized weight, which stands for ``count`` of the checkpoint's."""
        return self._linear(weight, count, weight.n)

    def _linear(self, weight: QWeight, count: int, uncut_n: int) -> LinearLayer:
        """``linear`` for a weight [N, K] that is all of a layer of ``uncut_n`` outputs, or a rank's share."""
        problem = weight.problem(self.dtype, self.device_type, self.exact, uncut_n if self.uniform else 0)
        module = self._bind("linear", problem, weight.scheme, count)
        layer: LinearLayer = module.prepare(weight.to(self.device), problem)
        return layer

    def dense(self, weight: Tensor, bias: Tensor | None = None, count: int = 1) -> DenseLayer:
        """A linear layer of a weight [N, K] and bias [N] in floats, which stands for ``count`` of the checkpoint's."""
        n, k = weight.shape
        problem = DenseProblem(n, k, weight.dtype, self.dtype, self.device_type)
        module = self._bind("dense", problem, "w16", count)
        bias = None if bias is None else bias.to(self.device)
        layer: DenseLayer = module.prepare(weight.to(self.device), bias, problem)
        return layer

    def lora(
        self, n: int, k: int, rows: AdapterRows, slots: int, max_rank: int, bias: Tensor | None = None
    ) -> LoraProduct:
        """The adapters of a linear layer of ``bias`` [N]; ``rows`` have them. The rest is as in LoraProblem."""
        problem = LoraProblem(n, k, slots, max_rank, self.dtype, self.device_type)
        product: LoraProduct = self._bind("lora", problem).prepare(problem, rows, bias)
        return product

    def batched(self, weight: Tensor) -> BatchedLinear:
        """A batch of linear layers of weights [B, N, K] in floats, each over columns of its own."""
        problem = BatchedProblem(*weight.shape, weight.dtype, self.dtype, self.device_type)
        layer: BatchedLinear = self._bind("batched", problem).prepare(weight.to(self.device), problem)
        return layer

    def experts(self, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation) -> GroupedExperts:
        """Gated MLPs of the same sizes, each on rows of its own: the first layer of each and the second."""
        first, second = zip(*pairs, strict=True)
        problem = ExpertsProblem(self.dtype, self.device_type)
        layers = ExpertLayers(first, second, act, self.row_multiple)
        bound: GroupedExperts = self._bind("experts", problem).prepare(layers, problem)
        return bound

    def rms_norm(self, weight: Tensor, epsilon: float) -> Norm:
        """RMS norm with ``weight`` [D]."""
        return self._norm("rms", weight, None, epsilon)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> Norm:
        """Layer norm with ``weight`` and, where there is one, ``bias`` [D]."""
        return self._norm("layer", weight, bias, epsilon)

    def _norm(self, kind: str, weight: Tensor, bias: Tensor | None, epsilon: float) -> Norm:
        problem = NormProblem(kind, weight.shape[0], self.dtype, self.device_type)
        layer: Norm = self._bind("norm", problem).prepare(weight, bias, epsilon, problem)
        return layer

    def activation(self, function: str) -> Activation:
        """An activation function, a key of FUNCTIONS in ops/activation.py."""
        problem = ActivationProblem(function, self.dtype, self.device_type)
        layer: Activation = self._bind("activation", problem).prepare(problem)
        return layer

    def scaling(self, scale: float = 1.0, cap: float | None = None, factors: Tensor | None = None) -> Scaling:
        """softcap(scale * x) + added; ``factors`` [positions] float32 also scale each row by its position."""
        problem = ScalingProblem(self.dtype, self.device_type)
        layer: Scaling = self._bind("scaling", problem).prepare(scale, cap, factors, problem)
        return layer

    def embedding(self, table: Tensor) -> EmbeddingLayer:
        """Rows of ``table`` [V, D], which keeps its dtype, in the dtype of the activations."""
        problem = EmbeddingProblem(table.dtype, self.dtype, self.device_type)
        layer: EmbeddingLayer = self._bind("embedding", problem).prepare(table.to(self.device), problem)
        return layer

    def tied_embedding(self, table: Tensor) -> tuple[EmbeddingLayer, DenseLayer]:
        """The embedding of ``table`` [V, D] and the head that is tied to it: one copy of the weight."""
        head = self.dense(table)
        rows = head.embedding()
        return self.embedding(rows) if isinstance(rows, Tensor) else rows, head

    def row_selection(self) -> RowSelection:
        """Rows of activations, by their numbers."""
        problem = EmbeddingProblem(self.dtype, self.dtype, self.device_type)
        selection: RowSelection = self._bind("embedding", problem).row_selection(problem)
        return selection

    def attention(
        self,
        spec: AttentionSpec,
        inputs: Sequence[tuple[LinearLayer, str]] = (),
        output: LinearLayer | None = None,
    ) -> PagedAttention:
        """The attention of one layer.

        inputs  where nothing else stands between: the layers that project to queries, keys and values, each with a
                letter for every part of its outputs: q, k or v for something of the width of all queries, keys, values.
        output  with ``inputs``, the layer that alone reads what attention returns.
        """
        problem = spec.problem(self.dtype, self.kv_dtype or self.dtype, self.device_type)
        layer: PagedAttention = self._bind("attention", problem).prepare(spec, problem)
        return layer

    def new_cache(self, spec: AttentionSpec, pages: int, page_size: int) -> LayerCache:
        """The KV cache of one layer, all zeros, as the implementation of its attention lays it out."""
        problem = spec.problem(self.dtype, self.kv_dtype or self.dtype, self.device_type)
        _, module = self.select("attention", problem)
        cache: LayerCache = module.new_cache(problem, pages, page_size, self.device)
        return cache

    def cache_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values of one layer in a cache of ``dtype``."""
        return spec.cache_bytes(dtype)

    def sampler(self) -> Sampler:
        """Tokens from float32 logits."""
        problem = SamplingProblem(torch.float32, self.device_type)
        sampler: Sampler = self._bind("sampling", problem).prepare(problem)
        return sampler

    def selected(self, operation: str) -> set[str]:
        """Names of the implementations that layers of ``operation`` were bound to."""
        return {each.selection.name for each in self.bound if each.operation == operation}

    def of_packages(self) -> set[str]:
        """Names of the implementations of other packages that layers were bound to, other than samplers."""
        names = {(each.operation, each.selection.name) for each in self.bound if each.operation != "sampling"}
        return {name for operation, name in names if REGISTRIES[operation].package(name) is not None}

    def select(self, operation: str, problem: Any) -> tuple[Selection, ModuleType]:
        """The implementation for ``problem`` and its module, without binding anything."""
        found = self._selected.get((operation, problem))
        if found is None:
            excluded = self.excluded if operation in ("linear", "dense") else ()
            found = self._selected[operation, problem] = select(operation, REGISTRIES[operation], problem, excluded)
        return found

    def _bind(self, operation: str, problem: Any, kind: str = "", count: int = 1) -> Any:
        selection, module = self.select(operation, problem)
        self.bound[Bound(operation, kind, selection)] += count
        if operation in ("linear", "dense", "batched"):
            self._row_multiple = max(self._row_multiple, getattr(module, "ROW_MULTIPLE", linear.ROW_MULTIPLE))
        return module


class PlannedOps(Ops):
    """Selects implementations like ``ops`` and notes them, but prepares nothing.

    Its tensors are on the meta device, and its layers cannot be called. For looking at a model without its weights.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(torch.device("meta"), ops.dtype, ops.kv_dtype, ops.excluded, ops.exact, ops.uniform)
        self.device_type = ops.device_type

    def _bind(self, operation: str, problem: Any, kind: str = "", count: int = 1) -> Any:
        super()._bind(operation, problem, kind, count)
        return _NotPrepared()


class _NotPrepared:
    """In the place of an implementation's module, and of the layers it would prepare."""

    def prepare(self, *arguments: Any) -> Any:
        return self

    row_selection = embedding = feeds = prepare
