"""Types shared by kernels: quantized weights, problem descriptions, activation layouts.

Shapes, everywhere: M tokens, N outputs, K inputs, G inputs per scale group, T flattened tokens,
H heads, D head size, P page size in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.input_rounding import InputRounding as InputRounding
from aiakq.kernels.input_rounding import kernel_scheme as kernel_scheme
from aiakq.kernels.recurrent_types import StateContext

#: Bits of one weight code for each scheme. ``w16`` is any unquantized float. The codes of ``fp8`` are 8-bit floats, and
#: with ``a8`` activations are rounded to e4m3. Those of ``lut4`` are indices into a table (look-up table) of 16 floats,
#: and with ``a4`` and ``a8`` activations are rounded to e2m1 and e4m3; ``QWeight.rounding`` says more.
SCHEME_BITS = {
    **{f"w{bits}a16": bits for bits in (2, 3, 4, 5, 6, 8)},
    **{f"w{bits}a8": bits for bits in (2, 3, 4, 5, 6)},
    "lut4a16": 4,
    "lut4a8": 4,
    "lut4a4": 4,
    "w8a8": 8,
    "fp8a16": 8,
    "fp8a8": 8,
}
#: 8-bit dtypes of the KV cache, with one scale per token and head, and the value to which the largest element of a head
#: is scaled. e5m2 has exponent range to spare: its scales are near 1, so that products fit into float16.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 16.0}


#: Tensors of a QWeight that have a row per output.
_OF_ROWS = ("codes", "scales", "zeros", "offsets", "bias")


@dataclass
class QWeight:
    """One quantized linear layer, in the canonical layout that every format reads into and writes from.

    Its weight is ``W[n, perm[j]] = (codes[n, j] - zeros[n, j // G]) * scales[n, j // G]``. If codes are floats or
    indices, their values take the place of codes - zeros; with offsets it is ``codes * scales + offsets``.

    scheme      a key of SCHEME_BITS.
    codes       [N, K] uint8, each in 0 .. 2**bits - 1, one code per byte (implementations repack them).
    code_type   float8_e4m3fn or float8_e5m2, whose bits the codes are, none of them NaN or infinite; None: integers.
    table       [2**bits] float32, the values of the codes (schemes lut4a*, no other); None: they are no indices.
    scales      [N, ceil(K / G)] float; may be negative (some tools write signed scales).
    zeros       [N, ceil(K / G)] uint8 or float zero points; None for symmetric weights: 2**(bits - 1).
    offsets     [N, ceil(K / G)] float, which are added after scaling, in place of zero points (GGUF, MLX), or None.
    perm        [K] int64, or None for the natural order: column j of ``codes`` multiplies input perm[j].
    bias        [N] float or None.
    group_size  G; equal to K for one scale per row.
    input_scale scalar float32, the static activation scale (schemes with a8 or a4 only); None means one dynamic scale
                per token, or what ``rounding`` says.
    rounding    how activations are rounded (schemes with a8 or a4 only).
    rounded     dtype to which the tool that wrote W rounds its elements when it decodes them (bitsandbytes), or None.
    unit        number by which e4m3 numbers are divided to give the scales (NVFP4), if files must keep it, or None.
    rotated     whether W multiplies inputs rotated by a Hadamard matrix (hadamard.py), instead of the inputs.
    factors     [K] float, by which inputs in their natural order are multiplied before anything else (AWQ), or None.
    """

    scheme: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 0
    input_scale: Tensor | None = None
    rotated: bool = False
    code_type: torch.dtype | None = None
    rounding: InputRounding = InputRounding()
    table: Tensor | None = None
    offsets: Tensor | None = None
    rounded: torch.dtype | None = None
    unit: float | None = None
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        if self.group_size <= 0:
            self.group_size = self.k

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def bits(self) -> int:
        return SCHEME_BITS[self.scheme]

    def without_rounding(self) -> QWeight | None:
        """Return the weight-only layer that is applied to rounded inputs, for a rounding that no kernel computes; None
        for other weights: their kernels round the inputs, if any.
        """
        scheme = kernel_scheme(self.scheme, self.rounding)
        if scheme == self.scheme:
            return None
        return replace(self, scheme=scheme, input_scale=None, rounding=InputRounding())

    def to(self, device: torch.device) -> QWeight:
        """Return the same weight on another device."""
        return self._with(lambda value: value.to(device), *_OF_ROWS, "perm", "input_scale", "table", "factors")

    def with_rows(self, rows: Tensor) -> QWeight:
        """Return the weight with rows (outputs) ``rows`` [M] int64, in this order."""
        return self._with(lambda value: value[rows], *_OF_ROWS)

    def _with(self, change: Callable[[Tensor], Tensor], *names: str) -> QWeight:
        changed: dict[str, Any] = {name: change(old) for name in names if (old := getattr(self, name)) is not None}
        return replace(self, **changed)

    def with_inputs(self, first: int, end: int) -> QWeight:
        """Return the weight with columns first .. end - 1 of ``codes``, in natural order: its inputs are those that
        ``perm`` names there.

        If a group straddles a boundary, all groups are split into smaller ones with repeated scales.
        """
        assert not self.rotated, "every rotated input depends on all inputs"
        assert not self.rounding.group or first % self.rounding.group == 0, "a rank must have all inputs of a scale"
        group, factors = self.group_size, self.factors
        if factors is not None:
            factors = (factors if self.perm is None else factors[self.perm])[first:end]
        part = replace(self, codes=self.codes[:, first:end].contiguous(), perm=None, factors=factors)
        if group >= self.k:
            return replace(part, group_size=end - first)
        whole = first % group == 0 and (end % group == 0 or end == self.k)
        size = group if whole else math.gcd(group, first, end)

        def divided(values: Tensor) -> Tensor:
            return values.repeat_interleave(group // size, dim=1)[:, first // size : -(-end // size)].contiguous()

        return replace(part._with(divided, "scales", "zeros", "offsets"), group_size=size)

    def problem(self, dtype: torch.dtype, device: str, exact: bool = True, uncut_n: int = 0) -> LinearProblem:
        """Return the problem that describes this weight, applied to activations of ``dtype``, to implementations; see
        LinearProblem for the other arguments.
        """
        return LinearProblem(
            scheme=self.scheme,
            n=self.n,
            k=self.k,
            group_size=self.group_size,
            has_zeros=self.zeros is not None,
            has_perm=self.perm is not None,
            has_bias=self.bias is not None,
            static_input=self.input_scale is not None,
            dtype=dtype,
            device=device,
            exact=exact,
            uncut_n=uncut_n,
            has_offsets=self.offsets is not None,
        )


@dataclass(frozen=True)
class LinearProblem:
    """Describes a linear layer to implementations before one is bound to it; also the key of tuned configurations.

    exact    whether activations must not be rounded further than the scheme specifies; else they may be quantized to
             8 bits, with one scale per at most 32.
    uncut_n  outputs of the whole layer of which this is a rank's shard: sums must be split among programs as for the
             whole layer. 0: only this layer matters.
    """

    scheme: str
    n: int
    k: int
    group_size: int
    has_zeros: bool
    has_perm: bool
    has_bias: bool
    static_input: bool
    dtype: torch.dtype
    device: str
    exact: bool = True
    uncut_n: int = 0
    has_offsets: bool = False

    @property
    def bits(self) -> int:
        return SCHEME_BITS.get(self.scheme, 16)


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
    """Activations [M, K] as int8 codes and scales [M] float32; ``dtype`` is that of the linear layer's output."""

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
    value_dim       size of a value head; 0: the size of a key head.
    latent          whether only keys are cached and values are their last ``value_dim`` elements (MLA, DeepSeek-V2
                    2024, arXiv:2405.04434).
    chunk_size      size of the chunks in which a query attends only to its own (Llama 4); None: no chunks.
    softcap         scores become softcap * tanh(scores / softcap) (Gemma 2); 0: no soft cap.
    sinks           [H] a score per head that joins the softmax without a value (GPT-OSS), or None.
    alibi           [H] slopes: the bias of a key at distance n is -slope * n (Press et al. 2022, arXiv:2108.12409); or
                    None.
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

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.head_dim
        if self.uncut_heads == (0, 0):
            self.uncut_heads = self.num_heads, self.num_kv_heads
        assert not self.latent or self.value_dim <= self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values: H * D, Hkv * D and Hkv * value_dim, which is 0 for latents."""
        values = 0 if self.latent else self.num_kv_heads * self.value_dim
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, values

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values, with their scales, in a cache of ``dtype``."""
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
    states        state rows, for models with recurrent layers.
    """

    query_start: Tensor
    kv_len: Tensor
    slots: Tensor
    page_table: Tensor
    num_decodes: int
    query_start_list: list[int]
    kv_len_list: list[int]
    plans: dict[object, Any] = field(default_factory=dict)
    states: StateContext | None = None
