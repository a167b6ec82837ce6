"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613): rotary embedding, gated MLPs, segments, and no biases."""

from __future__ import annotations

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders.gte import GteBuilder


class NomicBertBuilder(GteBuilder):
    """NomicBERT."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layers",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        attention_norm="norm1",
        gate_up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        mlp_norm="norm2",
    )
    embedding_norm = "emb_ln"
    qkv_bias = output_bias = mlp_bias = False

    def gate_up(self, layer: int, width: int, inner: int) -> LinearLayer:
        """Return the first layer of an MLP, the gate's outputs first."""
        return self.weights.stacked([(self.layer_name(layer, name), inner) for name in self.names.gate_up], width)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return NomicBertBuilder(config, weights).build()
