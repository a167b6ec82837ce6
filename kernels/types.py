"""The types every kernel implementation shares: a quantized weight, and the problems it is asked about.

Shapes, the same everywhere: M tokens, N outputs, K inputs, G inputs per scale group, T flattened tokens,
H heads, D head size, P page size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Bits of one weight code for each scheme. ``w16`` is any unquantized float.
SCHEME_BITS = {"w2a16": 2, "w3a16": 3, "w4a16": 4, "w8a16": 8, "w8a8": 8}


#: Types of 8 bits that keys and values are stored in, with a scale per token and head; and what the largest element of
#: a head becomes. e5m2 has exponents to spare: its scales are near 1, so that float16 holds their products.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 16.0}


@dataclass
class QWeight:
    """One quantized linear layer, in the canonical layout that every format reads into and writes from.

    The float weight is ``W[n, perm[j]] = (codes[n, j] - zeros[n, j // G]) * scales[n, j // G]``.

    scheme      a key of SCHEME_BITS.
    codes       [N, K] uint8, each in 0 .. 2**bits - 1, one code per byte (implementations re-pack).
    scales      [N, ceil(K / G)] float; may be negative (some tools write signed scales).
    zeros       [N, ceil(K / G)] uint8 or float, or None for symmetric weights: then 2**(bits - 1).
    perm        [K] int64, or None for the natural order: column j of ``codes`` multiplies input perm[j].
    bias        [N] float or None.
    group_size  G; equal to K for one scale per row.
    input_scale scalar float32 for a stored activation scale (w8a8 only); None means one per token.
    """

    scheme: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 0
    input_scale: Tensor | None = None

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

    def to(self, device: torch.device) -> QWeight:
        """The same weight on another device."""
        moved = {
            name: value.to(device)
            for name in ("codes", "scales", "zeros", "perm", "bias", "input_scale")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def problem(self, dtype: torch.dtype, device: torch.device, exact: bool = True) -> LinearProblem:
        """The question to ask an implementation about running this weight on activations of ``dtype``."""
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
            device=device.type,
            exact=exact,
        )


@dataclass(frozen=True)
class LinearProblem:
    """What an implementation is asked about before it is bound to a layer; also the tuning key.

    exact  activations may be rounded no further than the scheme says; else to 8 bits, with a scale per 32 at most.
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

    @property
    def bits(self) -> int:
        return SCHEME_BITS.get(self.scheme, 16)


@dataclass(frozen=True)
class Rounding:
    """How a product of integers wants its activations from whoever makes them: as ``Rounded``.

    given  the stored scale [1] float32 of all of them, or None: a scale for each row, max |x| / 127.
    """

    given: Tensor | None


@dataclass(frozen=True)
class Rounded:
    """Activations [M, K] as int8 codes and their scales [M] float32; ``dtype`` is that of what is made of them."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Arranging:
    """How a product of weights in groups (triton/grouped.py) wants its activations: as ``Arranged``.

    perm         [K] int32, which input stands at each place, or None for their own order.
    bits, plane  of the layout of the weights.
    stride       of sums, which are [count, stride] float32, or 0 if there are none.
    per_plane    whether there is one sum for each plane, or two for each step.
    """

    perm: Tensor | None
    bits: int
    plane: int
    stride: int
    per_plane: bool


@dataclass(frozen=True)
class Arranged:
    """Activations [M, K] in the order of the weights, and what the product needs of their sums."""

    rows: Tensor
    sums: Tensor | None


#: What a layer wants of whoever makes its activations; None: nothing.
Wish: TypeAlias = Rounding | Arranging | None
#: A Tensor, or Rounded or Arranged where such a wish was fulfilled; only the layer whose wish it was takes those.
Rows: TypeAlias = Any


@dataclass(frozen=True)
class AttentionProblem:
    """One attention layer over the paged KV cache, as an implementation is asked about it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    sliding_window: int | None
    dtype: torch.dtype
    device: str


@dataclass
class AttentionContext:
    """Where the tokens of one step live in the paged cache; built per step, passed as an argument.

    The batch is T tokens flattened: sequence s owns rows query_start[s] .. query_start[s+1] - 1.
    Rows at and after query_start[-1] are padding: their slot is 0 (page 0 is never given to a sequence) and
    what attention returns for them is unspecified but finite.

    query_start   [S + 1] int32, offsets into the flattened tokens; also as a list in ``query_start_list``.
    kv_len        [S] int32, tokens in the cache after this step, so the queries of s are its last ones.
    slots         [T] int64, page * P + offset where each token's key and value are written.
    page_table    [S, max pages] int32, padded with 0.
    num_decodes   the first ``num_decodes`` sequences have exactly one query token.
    plans         what an implementation works out once per step and shares among layers; its own business.
    """

    query_start: Tensor
    kv_len: Tensor
    slots: Tensor
    page_table: Tensor
    num_decodes: int
    query_start_list: list[int]
    kv_len_list: list[int]
    plans: dict[Any, Any] = field(default_factory=dict)
