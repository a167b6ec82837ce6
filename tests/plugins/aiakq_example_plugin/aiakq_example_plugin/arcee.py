"""A model family. Arcee: Llama whose MLP has no gate and a squared ReLU (So et al. 2021, arXiv:2109.08668)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.ops.parallel import ROW, Column
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, PlainMLP, Weights
from aiakq.runtime.models.llama import LlamaBuilder


class SquaredReLU:
    """max(x, 0)²."""

    def __call__(self, x: Tensor, layout: Any = None) -> Tensor:
        """x [M, I] -> [M, I]. Whatever layout the next layer would like, it takes a plain tensor as well."""
        return torch.relu(x).square()


class ArceeBuilder(LlamaBuilder):
    """Llama but for its MLP."""

    def mlp(self, layer: int) -> PlainMLP:
        """up and down, without a gate."""
        D, F, bias = self.config.hidden_size, self.config.intermediate_size, self.mlp_bias
        down = self.weights.linear(self.layer_name(layer, "mlp.down_proj"), D, F, bias=bias, role=ROW)
        up = self.weights.linear(self.layer_name(layer, "mlp.up_proj"), F, D, bias=bias, role=Column(down, "u"))
        return PlainMLP(up, down, SquaredReLU())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """ArceeForCausalLM from ``weights``."""
    return ArceeBuilder(config, weights).build()
