"""A model family. Arcee: Llama whose MLP has no gate and a squared ReLU (So et al. 2021, arXiv:2109.08668)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, PlainMLP, Weights
from aiakq.runtime.models.llama import build_llama_like


class SquaredReLU:
    """max(x, 0)²."""

    def __call__(self, x: Tensor, layout: Any = None) -> Tensor:
        """x [M, I] -> [M, I]. Whatever layout the next layer would like, it takes a plain tensor as well."""
        return torch.relu(x).square()


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """ArceeForCausalLM from ``weights``."""
    D, F = config.hidden_size, config.intermediate_size
    bias = bool(config.raw.get("mlp_bias", False))

    def mlp(layer: int) -> PlainMLP:
        at = f"model.layers.{layer}.mlp"
        return PlainMLP(
            weights.linear(f"{at}.up_proj", F, D, bias=bias),
            weights.linear(f"{at}.down_proj", D, F, bias=bias),
            SquaredReLU(),
        )

    attention_bias = bool(config.raw.get("attention_bias", False))
    return build_llama_like(config, weights, qkv_bias=attention_bias, output_bias=attention_bias, mlp=mlp)
