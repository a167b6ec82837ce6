"""Types shared by kernels: quantized weights, problem descriptions, activation layouts.

Shapes, everywhere: M tokens, N outputs, K inputs, G inputs per scale group, T flattened tokens,
H heads, D head size, P page size in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.input_rounding import InputRounding as InputRounding
from aiakq.kernels.input_rounding import kernel_scheme as kernel_scheme
from aiakq.kernels.quantized_weight import SCHEME_BITS as SCHEME_BITS
from aiakq.kernels.quantized_weight import LinearProblem as LinearProblem
from aiakq.kernels.quantized_weight import QWeight as QWeight
from aiakq.kernels.recurrent_types import StateContext, StateTables

#: 8-bit dtypes of the KV cache, with one scale per token and head, and the value to which the largest element of a head
#: is scaled. e5m2 has exponent range to spare: its scales are near 1, so that products fit into float16.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 16.0}


@dataclass(frozen=True)
class DenseProblem:
    """A linear layer whose weight [N, K] is stored as floats; ``dtype`` is that of the activations."""

    n: int
    k: int
    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class BatchedProblem:
    """A batch of B linear layers whose weights [B, N, K] are floats; ``dtype`` is that of the activations."""

    batch: int
    n: int
    k: int
    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class ExpertsProblem:
    """The experts of a mixture; ``dtype`` is that of the activations."""

    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class RoutingProblem:
    """The routing of a mixture: a Routing of ``kind`` (ops/routing.py) over a number of experts; ``dtype`` is that of
    the scores.
    """

    kind: str
    experts: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class NormProblem:
    """Normalization over the last dimension of [M, size]; ``kind`` is rms, or layer for layer norm."""

    kind: str
    size: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class ActivationProblem:
    """An activation function, a key of FUNCTIONS in ops/activation.py."""

    function: str
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class ScalingProblem:
    """softcap(scale * x) + added; see ops/scaling.py."""

    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class EmbeddingProblem:
    """Lookup in a table [V, D] of ``weight_dtype`` as activations of ``dtype``, or selection of activation rows."""

    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """Attention over the paged KV cache, including the head norms, rotary embedding and cache writes before it.

    The fields are those of AttentionSpec; ``sinks`` and ``alibi`` tell whether there are any.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str
    value_dim: int = 0
    latent: bool = False
    chunk_size: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    interleaved: bool = False
    reads_only: bool = False
    rotated_norms: bool = False


@dataclass(frozen=True)
class SamplingProblem:
    """Sampling of tokens from logits [R, V] of ``dtype``."""

    dtype: torch.dtype
    device: str


class ActivationLayout:
    """An input layout that a linear layer accepts besides a plain Tensor: ``linear.input_layout(m)``.

    Models and layers pass it, without inspecting it, to the operation that computes this input. An operation that does
    not know the layout's class returns a plain Tensor, which every linear layer accepts too.
    """


class PreparedActivation:
    """Activations in the layout requested by the next linear layer, which alone knows its contents."""


@dataclass(frozen=True)
class QuantizedActivation(PreparedActivation):
    """Activations [M, K] as int8 codes and scales [M] float32, or as float8_e4m3fn codes and scales [1, M], or
    [K / 128, M] for each 128 inputs; ``dtype`` is that of the linear layer's output.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class PackedActivation(PreparedActivation):
    """Activations [M, K] in the column order of a packed weight, and the sums of them that the product needs."""

    rows: Tensor
    sums: Tensor | None


#: Input of a linear layer: a Tensor [M, K], or a tensor in the layout of its own ``input_layout``.
LinearInput: TypeAlias = Tensor | PreparedActivation


@dataclass(eq=False)
class RotaryTables:
    """Cosines and sines [positions, R / 2] float32 that rotate the first R elements of every head.

    interleaved  whether the rotated pairs are elements 2i and 2i + 1 (GPT-J) instead of i and i + R / 2 (GPT-NeoX).
    """

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False

    @property
    def rotated(self) -> int:
        """R, the number of rotated elements per head."""
        return 2 * self.cosines.shape[1]


@dataclass(eq=False)
class AttentionSpec:
    """Specification of one attention layer.

    scale           factor of the scores, usually D ** -0.5.
    sliding_window  W: a query attends to itself and the W - 1 positions before it; None: to all previous positions.
    rotary          rotary tables; None for models with learned positions.
    q_norm, k_norm  weights [D] of an RMS norm of every head with epsilon ``norm_eps``, or None.
    rotated_norms   whether heads are normalized after their rotation (Hunyuan) instead of before it.
    value_dim       size of a value head; 0: the size of a key head.
    latent          whether only keys are cached and values are their last ``value_dim`` elements (MLA, DeepSeek-V2
                    2024, arXiv:2405.04434).
    chunk_size      size of the chunks in which a query attends only to its own (Llama 4); None: no chunks.
    softcap         scores become softcap * tanh(scores / softcap) (Gemma 2); 0: no soft cap.
    sinks           [H] a score per head that joins the softmax without a value (GPT-OSS), or None.
    alibi           [H] slopes: the bias of a key at distance n is -slope * n (Press et al. 2022, arXiv:2108.12409); or
                    None.
    reads_only      whether the layer has queries alone and reads the cache of an earlier layer (Gemma 4).
    uncut_heads     numbers of heads and key heads of the whole layer of which this is a rank's shard, by which work is
                    split among programs; zeros: those of this layer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    rotary: RotaryTables | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    value_dim: int = 0
    latent: bool = False
    chunk_size: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    uncut_heads: tuple[int, int] = (0, 0)
    reads_only: bool = False
    rotated_norms: bool = False

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.head_dim
        if self.uncut_heads == (0, 0):
            self.uncut_heads = self.num_heads, self.num_kv_heads
        assert not self.latent or self.value_dim <= self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values: H * D, Hkv * D and Hkv * value_dim, which is 0 for latents; of queries
        alone if the layer only reads.
        """
        kv_heads = 0 if self.reads_only else self.num_kv_heads
        values = 0 if self.latent else kv_heads * self.value_dim
        return self.num_heads * self.head_dim, kv_heads * self.head_dim, values

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token that the layer writes: keys, values and scales in a cache of ``dtype``."""
        if self.reads_only:
            return 0
        heads = (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)
        return self.num_kv_heads * sum(size * dtype.itemsize + 4 * (dtype in LARGEST) for size in heads)

    def problem(self, dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> AttentionProblem:
        """Return the problem that describes this layer to implementations."""
        return AttentionProblem(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_window=self.sliding_window,
            dtype=dtype,
            cache_dtype=cache_dtype,
            device=device,
            value_dim=self.value_dim,
            latent=self.latent,
            chunk_size=self.chunk_size,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            alibi=self.alibi is not None,
            interleaved=self.rotary is not None and self.rotary.interleaved,
            reads_only=self.reads_only,
            rotated_norms=self.rotated_norms,
        )


#: KV cache of one layer: keys [pages, P, Hkv, D] and values [pages, P, Hkv, value_dim], or keys alone for latents.
#: 8-bit caches also hold the scales [pages, P, Hkv] float32 of each. The memory layout is private to the attention
#: implementation that created the cache.
LayerCache: TypeAlias = Sequence[Tensor]


@dataclass
class AttentionContext:
    """Where the tokens of one step are stored in the paged cache; created per step and passed as an argument.

    The batch is T flattened tokens: sequence s owns rows query_start[s] .. query_start[s+1] - 1.
    Rows from query_start[-1] on are padding: their slot is 0 (page 0 is never given to a sequence), and
    the output of attention for them is unspecified but finite.

    query_start   [S + 1] int32, offsets into the flattened tokens; also as a list in ``query_start_list``.
    kv_len        [S] int32, tokens in the cache after this step, so the queries of s are the last ones.
    slots         [T] int64, page * P + offset where each token's key and value are written.
    page_table    [S, max pages] int32, padded with 0.
    num_decodes   the first ``num_decodes`` sequences have exactly one query token.
    plans         data that implementations compute once per step and share among layers, under their own keys.
    states        state rows, for models with recurrent layers; as tensors in captured steps.
    row_ends      [T] int32, the end of the positions that each token attends to, where tokens of images attend to each
                  other in both directions: ascending in a sequence, and behind the token's own; None: right behind it.
    """

    query_start: Tensor
    kv_len: Tensor
    slots: Tensor
    page_table: Tensor
    num_decodes: int
    query_start_list: list[int]
    kv_len_list: list[int]
    plans: dict[object, Any] = field(default_factory=dict)
    states: StateContext | StateTables | None = None
    row_ends: Tensor | None = None
