"""XGLM: OPT's blocks with sinusoidal positions and scaled embeddings (Lin et al. 2021, arXiv:2112.10668)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Rescale, Weights
from aiakq.runtime.models.opt import POSITION_OFFSET


class XGLMBuilder(LayerNormBuilder):
    """XGLM."""

    names = Names(
        norm="model.layer_norm",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
    )
    qkv_bias = output_bias = mlp_bias = True

    def after_embedding(self) -> Rescale | None:
        """Return the multiplier sqrt(hidden_size) of embeddings, unless it is off."""
        return self.ops.scaling(math.sqrt(self.config.hidden_size)) if self.config.raw["scale_embedding"] else None

    def positions(self) -> EmbeddingLayer:
        """Return the embedding of positions."""
        config = self.config
        table = sinusoids(config.max_position + POSITION_OFFSET, config.hidden_size)
        padding = config.raw.get("pad_token_id")
        if padding is not None:
            if type(padding) is not int or not -len(table) <= padding < len(table):
                raise malformed("pad_token_id", padding, f"a row of the {len(table)} positions, of which it is zero")
            table[padding] = 0
        return self.ops.embedding(table[POSITION_OFFSET:].to(self.ops.device, self.ops.dtype))

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, since positions are embedded."""
        return None


def sinusoids(rows: int, width: int) -> Tensor:
    """Return the sines, then the cosines, of ``rows`` positions with frequencies from 1 to 1/10000, [rows, width]
    float32, as in tensor2tensor (Vaswani et al. 2018, arXiv:1803.07416); the last column is zero for an odd width.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows).float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(rows, width % 2)], dim=1)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """XGLMForCausalLM from ``weights``. Raises ``model_malformed``."""
    return XGLMBuilder(config, weights).build()
