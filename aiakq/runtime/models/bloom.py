"""Bloom: ALiBi, layer norms with biases (also of the embeddings), QKV interleaved by head (arXiv:2211.05100)."""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.alibi import AlibiBuilder
from aiakq.runtime.models.builder import Names, rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, Rescale, Weights


class BloomBuilder(AlibiBuilder):
    """Bloom."""

    names = Names(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
    qkv_bias = output_bias = mlp_bias = True

    def qkv(self, layer: int) -> LinearLayer:
        """Return the QKV projection, which is stored interleaved by head."""
        config = self.config
        rows = rows_by_part(config.num_heads, *[config.head_dim] * 3)
        name = self.layer_name(layer, self.names.qkv[0])
        return self.weights.linear(name, len(rows), config.hidden_size, bias=True, rows=rows, role=self.qkv_role)

    def after_embedding(self) -> Rescale:
        """Return the layer norm of the embeddings."""
        return self.norm("transformer.word_embeddings_layernorm")


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """BloomForCausalLM from ``weights``. Raises ``unsupported``."""
    if config.raw.get("apply_residual_connection_post_layernorm"):
        reason = "its residuals are taken after the norms (apply_residual_connection_post_layernorm)"
        raise unsupported(config, reason)
    return BloomBuilder(replace(config, activation="gelu_new"), weights).build()
