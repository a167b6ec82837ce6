"""Writes one linear in another format, or as floats, and proves that it reads back as the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from aiakq import formats
from aiakq.convert import plan as plans
from aiakq.convert.exact import Inexact, expressed
from aiakq.convert.lossy import Error, error_of, rounded
from aiakq.convert.report import LayerConversion
from aiakq.errors import error
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.dequantized import dense_weight, is_transposed
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec

_NO_ROUNDING = "activations are no longer rounded"


class LayerConverter(Protocol):
    """Converts the linears of a checkpoint one by one."""

    def convert(self, name: str, weight: QWeight | DecodedWeight) -> tuple[dict[str, Tensor], LayerConversion]:
        """Return the tensors of the linear ``name``, suffix -> tensor, and its entry in the report.

        Raises ``conversion_inexact``, ``not_as_written`` and ``not_finite``.
        """

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor ``name``, which is not quantized, as it is written. Raises ``not_finite``."""


@dataclass
class ToFormat:
    """Converts linears as ``plan`` says, which learns from the tensors what headers do not show.

    before  linear -> how it is stored, in a phrase.
    lossy   whether weights that the format cannot hold are rounded.
    """

    plan: plans.ConversionPlan
    before: dict[str, str]
    lossy: bool

    def convert(self, name: str, weight: QWeight | DecodedWeight) -> tuple[dict[str, Tensor], LayerConversion]:
        """See LayerConverter."""
        plan, change = self.plan, ""
        if isinstance(weight, DecodedWeight):
            raise plans.inexact(name, plan.name, f"it is read as floats ({weight.reason})", lossy=False)
        layer, abilities = plan.layers[name], plan.abilities
        if layer.symmetric and weight.zeros is not None and name not in plan.changed:
            layer = self._with_zeros(name, layer)
        try:
            written = expressed(weight, layer, abilities)
        except Inexact as problem:
            if not self.lossy:
                raise plans.inexact(name, plan.name, str(problem)) from None
            written, change = rounded(weight, layer, abilities)
        spec = plan.layer_spec(name)
        module = formats.load(spec.format)
        tensors = module.write(replace(written, bias=None), spec, written.scales.dtype)
        if weight.bias is not None:
            tensors["bias"] = weight.bias
        back = module.read(tensors, spec, name)
        assert isinstance(back, QWeight), "what formats write is read as codes"
        back = back.unpacked
        found = error_of(back, weight)
        same = found.is_zero and _computes_alike(back, weight)
        if not change and not same:
            change = self._rounds_otherwise(name, weight)
        if not change and not same:
            raise error("not_as_written", layer=name)
        return tensors, _entry(name, weight, self.before[name], spec.describe(), found, change)

    def _rounds_otherwise(self, name: str, weight: QWeight) -> str:
        """Return how a weight was changed whose numbers are stored in another way; empty if it should be the same.

        (q - z) s and q s + o need not round alike, nor do scales of NVFP4 by a stored factor and by its inverse.
        Raises ``conversion_inexact`` unless that is allowed.
        """
        reasons = {
            "its offsets round otherwise than zero points do": ("offsets became zero points", weight.offsets),
            "its scales round otherwise there": ("scales were rounded", weight.table),
        }
        for reason, (change, tensor) in reasons.items():
            if tensor is not None:
                if not self.lossy:
                    raise plans.inexact(name, self.plan.name, reason)
                return change
        return ""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, of any shape, as it is."""
        return tensor

    def _with_zeros(self, name: str, layer: LayerSpec) -> LayerSpec:
        """Return how a linear is stored whose config says that it is symmetric, and whose zero points are not."""
        asymmetric = replace(layer, symmetric=False)
        if plans.refusal(self.plan.name, asymmetric, self.plan.source) is not None:
            return layer
        self.plan.layers[name] = asymmetric
        return asymmetric


@dataclass
class ToFloats:
    """Dequantizes linears to ``dtype``.

    before  linear -> how it is stored, in a phrase.
    config  config.json, which says whether layers are stored as [K, N].
    """

    dtype: torch.dtype
    before: dict[str, str]
    config: Mapping[str, object]

    def convert(self, name: str, weight: QWeight | DecodedWeight) -> tuple[dict[str, Tensor], LayerConversion]:
        """See LayerConverter."""
        dense = self._cast(f"{name}.weight", dense_weight(weight, self.dtype))
        change = _NO_ROUNDING if isinstance(weight, QWeight) and not weight.scheme.endswith("a16") else ""
        word = str(self.dtype).removeprefix("torch.")
        entry = _entry(name, weight, self.before[name], word, error_of(dense, weight), change)
        if is_transposed(self.config, name):
            dense = dense.T.contiguous()
        bias = {} if weight.bias is None else {"bias": self.plain(f"{name}.bias", weight.bias)}
        return {"weight": dense, **bias}, entry

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, of any shape, in the dtype of the output if it holds floats, but vectors of float32 as
        they are: families keep those in 32 bits on purpose, such as the corrections of a router.
        """
        wide = tensor.dtype in (torch.float32, torch.float64) and tensor.dim() < 2
        return tensor if wide or not tensor.is_floating_point() else self._cast(name, tensor.to(self.dtype))

    def _cast(self, name: str, result: Tensor) -> Tensor:
        if not bool(torch.isfinite(result).all()):
            what = f"{name} as {str(self.dtype).removeprefix('torch.')}"
            raise error("not_finite", what=what, hint="Use --to bf16 or fp32.")
        return result


def _entry(
    name: str, weight: QWeight | DecodedWeight, before: str, after: str, found: Error, change: str
) -> LayerConversion:
    return LayerConversion(name, weight.n, weight.k, before, after, found.relative, found.largest, change)


def _computes_alike(one: QWeight, other: QWeight) -> bool:
    """Whether two weights of equal numbers are multiplied by the same inputs, and have the same bias."""
    same = one.scheme.partition("a")[2] == other.scheme.partition("a")[2] and one.rounding == other.rounding
    same = same and one.rotated == other.rotated
    for a, b in ((one.input_scale, other.input_scale), (one.bias, other.bias)):
        same = same and (a is None) == (b is None) and (a is None or b is None or torch.equal(a.float(), b.float()))
    return same
