"""Families with ALiBi (Press et al. 2022, arXiv:2108.12409): a slope per head instead of position embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.models.builder import LayerNormBuilder


def slopes(heads: int, largest: float = 8.0) -> Tensor:
    """Return the slopes [H] float32: 2 ** (-largest * i / P) for P heads, the largest power of two up to H.

    The slopes of further heads lie between those, as in the paper's code.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-largest * (head + 1) / power) for head in range(power)]
    between = [2 ** (-largest * (2 * head + 1) / (2 * power)) for head in range(heads - power)]
    return torch.tensor(first + between, dtype=torch.float32)


class AlibiBuilder(LayerNormBuilder):
    """Families with layer norms and ALiBi."""

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None: ALiBi models have no rotary embedding."""
        return None

    def slopes(self) -> Tensor:
        """Return the slopes [H] float32."""
        return slopes(self.config.num_heads)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, with slopes."""
        return replace(super().attention_spec(layer), alibi=self.slopes().to(self.ops.device))
