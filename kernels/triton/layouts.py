"""Activation layouts accepted by Triton linear layers, which norms and activation functions write directly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.types import ActivationLayout, InputRounding, LinearInput, PackedActivation, QuantizedActivation

#: Columns per program if a program computes part of a row.
COLUMNS = 1024


def block_for(width: int) -> int:
    """Return the columns per program if a program computes a whole row of ``width``."""
    return 1 << (width - 1).bit_length()


def warps_for(block: int) -> int:
    """Return the number of warps of a program that computes ``block`` columns."""
    return min(16, max(1, block // 512))


@dataclass
class Output:
    """Output buffers for rows like x [M, D], and the arguments of ``write_row`` in layouts_kernel.py.

    activation  input of the linear layer.
    pointers    y, the scales of y, and a static scale; any tensor where there is none.
    constants   the remaining arguments by name.
    """

    activation: LinearInput
    pointers: tuple[Tensor, Tensor, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)


class TritonLayout(ActivationLayout):
    """A layout that Triton's kernels can write.

    whole_row  whether a program needs a whole row at once.
    permutes   whether columns are permuted.
    """

    @property
    def whole_row(self) -> bool:
        return False

    @property
    def permutes(self) -> bool:
        return False

    def output(self, x: Tensor) -> Output:
        """Allocate output for rows like x [M, D] in this layout."""
        raise NotImplementedError


@dataclass(frozen=True)
class QuantizedLayout(TritonLayout):
    """int8 codes with a scale per row, max |x| / 127, or with the static ``input_scale`` [1] float32."""

    input_scale: Tensor | None

    @property
    def whole_row(self) -> bool:
        return True

    def output(self, x: Tensor) -> Output:
        """Allocate a QuantizedActivation [M, D]; see TritonLayout."""
        codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        given = scales if self.input_scale is None else self.input_scale
        constants = {"CODES": True, "GIVEN": self.input_scale is not None}
        return Output(QuantizedActivation(codes, scales, x.dtype), (codes, scales, given), constants)


@dataclass(frozen=True)
class Float8Layout(TritonLayout):
    """e4m3 codes with a scale per row or per ``group`` inputs of one, computed as ``rounding`` says, or with the static
    ``input_scale`` [1] float32.

    group  inputs that share a scale; 0: all of a row.
    """

    input_scale: Tensor | None
    group: int
    rounding: InputRounding

    @property
    def whole_row(self) -> bool:
        return self.group == 0

    def output(self, x: Tensor) -> Output:
        """Allocate a QuantizedActivation [M, D]; see TritonLayout."""
        m, k = x.shape
        codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(-(-k // self.group) if self.group else 1, m, dtype=torch.float32, device=x.device)
        given = scales if self.input_scale is None else self.input_scale
        constants: dict[str, object] = {
            "CODES": True, "GIVEN": self.input_scale is not None, "E4M3": True, "scales_stride": m,
            "bound": self.rounding.bound, "min_scale": self.rounding.min_scale, "GROUP": self.group,
            "POWERS": self.rounding.powers_of_two,
        }  # fmt: skip
        return Output(QuantizedActivation(codes, scales, x.dtype), (codes, scales, given), constants)


@dataclass(frozen=True)
class PackedLayout(TritonLayout):
    """The column order and the sums that linear_kernel.py needs; see ``write_sums`` there.

    perm         [K] int32, input at each position, or None for the natural order.
    bits, plane  of the packed weight.
    stride       columns of the sums [count, stride] float32, or 0 if none are needed.
    per_plane    whether there is one sum per plane, or two per step.
    """

    perm: Tensor | None
    bits: int
    plane: int
    stride: int
    per_plane: bool

    @property
    def permutes(self) -> bool:
        return self.perm is not None

    def sums_for(self, x: Tensor) -> Tensor | None:
        """Allocate the sums of x [M, K]."""
        if not self.stride:
            return None
        planes = x.shape[1] // self.plane
        count = planes if self.per_plane else 2 * planes // (16 // self.bits)
        return torch.empty(count, self.stride, dtype=torch.float32, device=x.device)

    def output(self, x: Tensor) -> Output:
        """Allocate a PackedActivation [M, D]; see TritonLayout."""
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = self.sums_for(x)
        constants: dict[str, object] = {
            "CODES": False, "GIVEN": False, "sums_ptr": sums, "sums_stride": self.stride, "SUMS": sums is not None,
            "PER_PLANE": self.per_plane, "BITS": self.bits, "BKP": self.plane,
        }  # fmt: skip
        if self.perm is not None:
            constants |= {"perm_ptr": self.perm, "PERM": True}
        return Output(PackedActivation(y, sums), (y, y, y), constants)


def output_for(x: Tensor, layout: ActivationLayout | None) -> Output:
    """Allocate output for rows like x [M, D] in ``layout``, or as a plain Tensor if it is not one of Triton's."""
    if isinstance(layout, TritonLayout):
        return layout.output(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Output(y, (y, y, y), {"CODES": False, "GIVEN": False})
