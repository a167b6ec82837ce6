"""CodeGen: GPT-J with a fused projection, whose outputs are in four parts of queries, values and keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiakq.errors import error
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.gptj import GPTJBuilder

#: Parts of the projection, those of the chips on which the models were trained.
_PARTS = 4


class CodeGenBuilder(GPTJBuilder):
    """CodeGen."""

    names = replace(GPTJBuilder.names, qkv=("attn.qkv_proj",))

    def qkv(self, layer: int) -> LinearLayer:
        """Return the projection to queries, keys and values. Raises ``model_malformed`` if heads straddle its parts."""
        D, heads = self.config.hidden_size, self.config.num_heads
        if heads % _PARTS:
            reason = f"{heads} heads are no multiple of {_PARTS}"
            raise error("model_malformed", file="config.json", reason=reason)
        queries, values, keys = torch.arange(3 * D).view(_PARTS, 3, -1).unbind(1)
        rows = torch.cat([part.flatten() for part in (queries, keys, values)])
        name = self.layer_name(layer, self.names.qkv[0])
        return self.weights.linear(name, 3 * D, D, rows=rows, role=self.qkv_role)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """CodeGenForCausalLM from ``weights``."""
    return CodeGenBuilder(config, weights).build()
