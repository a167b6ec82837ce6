"""BlockResult: the quantized linears of a block, with what the report says about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from aiakq.formats.gguf.decoding import read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.input_rounding import rounding_of
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight
from aiakq.quantizers.model.plain_linears import take_weight
from aiakq.quantizers.numerics.magnitudes import Magnitudes, largest
from aiakq.rounding.integers import Rounding
from aiakq.spec import QuantSpec


class BlockResult:
    """The results of one block's linears, by name inside the block.

    finished    the quantized weight.
    rows        its rows of blocks, [N, bytes of a row] uint8, if it is one of a GGUF file.
    originals   the float32 weight [N, K] before rounding, until the errors are measured.
    errors      relative output error, ``||y_q - y|| / ||y||``, without bias.
    remarks     how the quantization parameters were chosen, for the report.
    magnitudes  the largest weights and inputs, before and after.
    warnings    sentences for the report.
    dropped     tokens left out of the statistics because an input was not finite.
    """

    def __init__(self, linears: Mapping[str, nn.Linear], specs: Mapping[str, QuantSpec]) -> None:
        self._linears = linears
        self._specs = specs
        self.finished: dict[str, QWeight] = {}
        self.rows: dict[str, Tensor] = {}
        self.originals: dict[str, Tensor] = {}
        self.errors: dict[str, float] = {}
        self.remarks: dict[str, dict[str, float | str]] = {}
        self.magnitudes = Magnitudes()
        self.warnings: list[str] = []
        self.dropped = 0
        for name, linear in linears.items():
            self.magnitudes.weight_before[name] = largest(linear.weight.data)

    def finish(
        self, name: str, rounding: Rounding, input_scale: Tensor | None = None, unit: float | None = None
    ) -> None:
        """Submit a linear: its codes and scales are what will be written and what the block computes with from now on.

        rounding: codes [N, K] uint8, scales and zeros [N, K / G] float32; ``input_scale``, a float32 scalar, if
        activations have a static scale; ``unit``, by which scales in e4m3 are divided (NVFP4). Call once per
        linear. The linear's weight is modified.
        """
        assert name not in self.finished, name
        codes, scales, zeros = rounding
        linear, spec = self._linears[name], self._specs[name]
        assert spec.static_input == (input_scale is not None), name
        bias = None if linear.bias is None else linear.bias.data
        weight = stored_weight((codes, scales, zeros), spec, bias, input_scale, unit)
        self.originals[name] = linear.weight.data
        self.adopt(name, weight)
        self.magnitudes.weight_after[name] = largest(linear.weight.data)

    def finish_blocks(self, name: str, rows: Tensor) -> None:
        """Submit a linear as rows of blocks of a GGUF file, [N, bytes of a row] uint8; otherwise as ``finish``."""
        assert name not in self.finished, name
        linear, kind = self._linears[name], self._specs[name].blocks
        assert kind is not None, name
        bias = None if linear.bias is None else linear.bias.data
        self.originals[name] = linear.weight.data
        self.rows[name] = rows
        self.adopt(name, read_weight(rows, KINDS[NUMBERS[kind]], name, bias))
        self.magnitudes.weight_after[name] = largest(linear.weight.data)

    def adopt(self, name: str, weight: QWeight) -> None:
        """Restore a linear that an earlier run finished; the block then computes as after ``finish``."""
        self.finished[name] = weight
        take_weight(self._linears[name], weight, self._linears[name].weight.device)

    def remark(self, name: str, **remarks: float | str) -> None:
        """Add to the report's remarks on the linear ``name``."""
        self.remarks.setdefault(name, {}).update(remarks)

    def clear(self) -> None:
        """Discard all finished linears and their remarks; the weights of the block are not modified."""
        for kept in (self.finished, self.rows, self.originals, self.remarks):
            kept.clear()


def stored_weight(
    rounding: Rounding,
    spec: QuantSpec,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    unit: float | None = None,
) -> QWeight:
    """Return a linear with the scheme of ``spec``; see ``BlockResult.finish``. bias [N], or None."""
    codes, scales, zeros = rounding
    return QWeight(
        scheme=spec.scheme,
        codes=codes,
        scales=scales,
        zeros=None if spec.symmetric else zeros.to(torch.uint8),
        bias=bias,
        group_size=codes.shape[1] if spec.group_size == -1 else spec.group_size,
        input_scale=input_scale,
        code_type=None if spec.float8 is None else torch.float8_e4m3fn,
        table=None if spec.table is None else torch.tensor(TABLES[spec.table], device=codes.device),
        rounding=rounding_of(spec, reciprocal=unit is not None),
        unit=unit,
    )
