"""QuantizedBase: what quantization changed in the layers of a model, and how adapters of the original model follow it.

With inputs divided by c and outputs by r, a layer computes y' = W' x' with x' = x / c, y' = y / r and
W' = diag(1 / r) W diag(c). An adapter of W becomes one of W' by A' = A diag(c) and B' = diag(1 / r) B. DoRA's factors
of rows do not change; they are computed from the norms of W. Layers that were padded with zeros get adapters
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from aiakq.formats.folded_scales import LinearScales, read_scales
from aiakq.formats.padded_widths import Widths, pad, pads_to, read_widths
from aiakq.runtime.lora.adapter_folder import LoraWeights

_UNCHANGED = LinearScales()


@dataclass(frozen=True)
class QuantizedBase:
    """Changes of the layers of a checkpoint; none by default.

    scales  name of a linear layer -> what was folded into it.
    widths  MLP widths that were padded: key of config.json -> before and after.
    """

    scales: Mapping[str, LinearScales] = field(default_factory=dict)
    widths: Widths = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, object]) -> QuantizedBase:
        """Read them from a checkpoint with this config.json. Raises ``model_incomplete``, ``model_malformed``."""
        return cls(read_scales(folder, config), read_widths(config))


def fits(sizes: tuple[int, int], layer: tuple[int, int], widths: Widths, name: str) -> bool:
    """Whether an adapter of a layer with ``sizes`` N and K fits one of sizes ``layer``, which may have been padded."""
    return all(
        have == want or pads_to(have, want, widths, name) is not None for have, want in zip(sizes, layer, strict=True)
    )


def fitted(lora: LoraWeights, scales: LinearScales, n: int, k: int, widths: Widths, name: str) -> LoraWeights:
    """Return ``lora``, trained on the original model, for the layer ``name`` [N, K] of the checkpoint.

    Where scales were folded its tensors become float32, so that nothing is rounded.
    """
    a, b, bias, magnitude = lora.a, lora.b, lora.bias, lora.magnitude
    if (len(b), a.shape[1]) != (n, k):
        a, b = pad(a, (len(a), k), widths, name), pad(b, (n, b.shape[1]), widths, name)
        bias, magnitude = (None if each is None else pad(each, (n,), widths, name) for each in (bias, magnitude))
    if scales.columns is not None:
        a, b = a.float() * scales.columns, b.float()
    if scales.rows is not None:
        a, b = a.float(), b.float() / scales.rows[:, None]
        bias = None if bias is None else bias.float() / scales.rows
    return replace(lora, a=a, b=b, bias=bias, magnitude=magnitude)


def dora_factors(weight: Tensor, lora: LoraWeights, scales: LinearScales = _UNCHANGED) -> Tensor:
    """Return DoRA's factors of rows [N] float32: magnitude over the norm of the merged row (Liu et al. 2024,
    arXiv:2402.09353).

    ``weight`` [N, K] and ``lora`` have ``scales`` folded into them. A row of padding has factor 1.
    """
    assert lora.magnitude is not None
    merged = weight.float() + lora.scale * (lora.b.float() @ lora.a.float())
    norms = torch.linalg.vector_norm(scales.unfolded(merged), dim=1)
    magnitude = lora.magnitude.float()
    return torch.where((norms == 0) & (magnitude == 0), torch.ones_like(norms), magnitude / norms)
