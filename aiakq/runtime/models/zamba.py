"""Zamba: Mamba with several heads, and a transformer block that some of its layers share (arXiv:2405.16712)."""

from __future__ import annotations

import torch

from aiakq.formats.config_values import malformed
from aiakq.kernels.recurrent_types import ConvolutionSpec, SelectiveScanSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.recurrent import HeadedStateSpace
from aiakq.runtime.layers.shared_block import SharedBlock
from aiakq.runtime.models.builder import rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, GatedMLP, Weights
from aiakq.runtime.models.mamba import step_rank
from aiakq.runtime.models.mamba2 import hybrid_width
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.zamba2 import SharedBlocksBuilder


class ZambaBuilder(SharedBlocksBuilder):
    """Zamba."""

    gate_up = ("gate_proj", "up_proj")

    def mamba(self, prefix: str) -> HeadedStateSpace:
        """Return the Mamba layer at ``prefix``. Raises ``model_malformed``."""
        raw, weights, D = self.config.raw, self.weights, self.config.hidden_size
        C, H, N, taps = hybrid_width(raw), size(raw, "n_mamba_heads"), size(raw, "mamba_d_state"), raw["mamba_d_conv"]
        if C % H:
            raise malformed("n_mamba_heads", H, f"a divisor of {C}")
        rank, width, bias = step_rank(raw, "mamba_dt_rank"), C // H, bool(raw["mamba_proj_bias"])
        a_log, skip, step_bias = (
            weights.tensor(f"{prefix}.{name}", H, width, *more, dtype=torch.float32)
            for name, more in (("A_log", (N,)), ("D", ()), ("dt_proj_bias", ()))
        )
        convolution = ConvolutionSpec(
            weights.tensor(f"{prefix}.conv1d.weight", C, 1, taps).squeeze(1),
            weights.tensor(f"{prefix}.conv1d.bias", C) if raw["mamba_conv_bias"] else None,
            silu=True,
        )
        return HeadedStateSpace(
            # A value and its gate are adjacent.
            weights.linear(f"{prefix}.in_proj", 2 * C, D, bias=bias, rows=rows_by_part(C, 1, 1)),
            convolution,
            self.ops.batched(weights.tensor(f"{prefix}.x_proj_weight", H, rank + 2 * N, width)),
            self.ops.batched(weights.tensor(f"{prefix}.dt_proj_weight", H, width, rank)),
            [SelectiveScanSpec(*parts) for parts in zip(a_log, step_bias, skip, strict=True)],
            rank,
            weights.linear(f"{prefix}.out_proj", D, C, bias=bias),
            self.ops,
        )

    def transformer(self, layer: int) -> SharedBlock:
        """Return the transformer block, whose weights the first hybrid layer has."""
        D, prefix = self.config.hidden_size, self.layer_name(self.hybrid[0], "shared_transf")
        norm, qkv, output, mlp_norm, gate_up, down = self.shared(prefix)
        return SharedBlock(
            norm,
            Attention(qkv, output, self.attention_spec(layer), self.ops),
            mlp_norm,
            GatedMLP(gate_up, down, activation(self.config.activation, self.ops)),
            self.weights.linear(self.layer_name(layer, "linear"), D, D),
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """ZambaForCausalLM from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    if config.raw.get("attention_hidden_size") not in (None, 2 * config.hidden_size):
        raise unsupported(config, f"attention_hidden_size is {config.raw['attention_hidden_size']!r:.64}")
    return ZambaBuilder(config, weights).build()
