"""MXFP4 of GPT-OSS and transformers, ``quant_method`` mxfp4: the experts of a layer in one tensor.

For E experts with N outputs and K inputs each, beside their biases ``NAME_bias`` [E, N]:

    NAME_blocks  [E, N, K / 32, 16] uint8, two e2m1 codes per byte, the first in the low bits
    NAME_scales  [E, N, K / 32] uint8: 2**(bits - 127)

A model family reads these tensors itself, as it does all fused experts; other linears are not quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from aiakq.formats import float4
from aiakq.formats.expert_stack import ExpertStack
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec

#: Inputs that share a scale.
GROUP = 32


def read_experts(blocks: Tensor, scales: Tensor, biases: Tensor, name: str, rows: Tensor | None) -> Iterator[QWeight]:
    """Yield the weight of each expert, one after the other, because unpacked codes take twice as much memory.

    biases  [E, N] float.
    rows    permutation [N] int64: output i is row rows[i] of the stored weight; None: the stored order.

    Raises ``not_finite`` for scales that are NaN.
    """
    for number, (packed, exponents, bias) in enumerate(zip(blocks, scales, biases, strict=True)):
        weight = QWeight(
            scheme="lut4a16",
            codes=float4.unpack(packed.flatten(1)),
            scales=float4.powers(exponents, f"{number}_scales", name),
            bias=bias,
            group_size=GROUP,
            table=float4.values().to(packed.device),
        )
        yield weight if rows is None else weight.with_rows(rows)


def stacked_experts(inventory: Mapping[str, TensorInfo]) -> list[ExpertStack]:
    """Return the experts of each tensor of codes."""
    layer = LayerSpec(4, GROUP, table=float4.TABLE, scale_type="e8m0")
    infos = (info for name, info in inventory.items() if name.endswith("_blocks") and info.dtype == "U8")
    shapes = (tuple(info.shape) for info in infos if len(info.shape) == 4)
    return [ExpertStack(count, n, groups * 2 * size, layer) for count, n, groups, size in shapes]
