"""QWeight, a quantized linear layer, and LinearProblem, by which its implementation is selected.

Shapes: N outputs, K inputs, G inputs per scale group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.input_rounding import InputRounding, kernel_scheme
from aiakq.kernels.tables import name_of

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

    @property
    def has_offsets(self) -> bool:
        return self.offsets is not None

    @property
    def unpacked(self) -> QWeight:
        """The weight with all of its tensors: see BlockWeight and WordWeight."""
        return self

    def with_bias(self, bias: Tensor | None) -> QWeight:
        """Return the weight with another bias [N]."""
        return replace(self, bias=bias)

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
            has_offsets=self.has_offsets,
            table=None if self.table is None else name_of(self.table.tolist()),
            rounding=self.rounding,
            e5m2=self.code_type == torch.float8_e5m2,
        )


@dataclass(frozen=True)
class LinearProblem:
    """Describes a linear layer to implementations before one is bound to it; also the key of tuned configurations.

    exact     whether activations must not be rounded further than the scheme specifies; else they may be quantized to
              8 bits, with one scale per at most 32.
    uncut_n   outputs of the whole layer of which this is a rank's shard: sums must be split among programs as for the
              whole layer. 0: only this layer matters.
    table     name of the values that codes are indices of (tables.py), or None.
    rounding  how activations are rounded, see QWeight.
    e5m2      whether codes are e5m2 numbers, not e4m3, if they are floats of 8 bits.
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
    table: str | None = None
    rounding: InputRounding = InputRounding()
    e5m2: bool = False

    @property
    def bits(self) -> int:
        return SCHEME_BITS.get(self.scheme, 16)
