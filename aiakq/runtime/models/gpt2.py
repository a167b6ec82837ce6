"""GPT-2 and GPT-BigCode (StarCoder): layer norms, learned positions, a fused QKV projection."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import ROW, Column, Role, Row
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.models.builder import LayerNormBuilder, Names, rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, PlainMLP, Weights


class LearnedPositionsBuilder(LayerNormBuilder):
    """GPT-2 and its relatives: an embedding of positions, and the names of their modules."""

    names = Names(
        embedding="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
    )
    output_bias = mlp_bias = True

    def positions(self) -> EmbeddingLayer:
        """Return the embedding of learned positions."""
        config = self.config
        table = self.weights.tensor("transformer.wpe.weight", config.max_position, config.hidden_size)
        return self.ops.embedding(table)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, since positions are learned."""
        return None


class GPTBigCodeBuilder(LearnedPositionsBuilder):
    """GPT-BigCode, and the base of GPT-2."""

    qkv_bias = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        if not config.raw.get("scale_attn_weights", True):
            self.scale = 1.0

    def qkv(self, layer: int) -> LinearLayer:
        """Return the QKV projection, which is interleaved by head unless the model uses multi-query attention."""
        config = self.config
        if config.num_kv_heads == 1:
            return super().qkv(layer)
        rows = rows_by_part(config.num_heads, *[config.head_dim] * 3)
        name = self.layer_name(layer, self.names.qkv[0])
        return self.weights.linear(name, len(rows), config.hidden_size, bias=True, rows=rows, role=self.qkv_role)


class GPT2Builder(GPTBigCodeBuilder):
    """GPT-2, whose linear layers are stored as [K, N]."""

    def conv1d(self, layer: int, name: str, n: int, k: int, role: Role) -> LinearLayer:
        """Return a linear layer with N outputs and K inputs that is stored as [K, N], or quantized."""
        prefix = self.layer_name(layer, name)
        if not self.weights.has(f"{prefix}.weight") or self.weights.is_packed(prefix):
            return self.weights.linear(prefix, n, k, bias=True, role=role)

        def weight() -> Tensor:
            return self.weights.tensor(f"{prefix}.weight", k, n).T.contiguous()

        bias = self.weights.tensor(f"{prefix}.bias", n)
        return self.weights.adaptable(self.weights.dense(weight(), bias, role=role), prefix, n, k, weight, bias)

    def attention(self, layer: int) -> Attention:
        """Return the attention of a layer. Raises ``unsupported`` for attention scores scaled by the layer index."""
        if self.config.raw.get("scale_attn_by_inverse_layer_idx"):
            self.scale = (self.config.head_dim**-0.5) / (layer + 1)
        D, spec = self.config.hidden_size, self.attention_spec(layer)
        qkv = self.conv1d(layer, self.names.qkv[0], 3 * D, D, Column(spec, "qkv"))
        output = self.conv1d(layer, self.names.output, D, D, Row(spec))
        return Attention(qkv, output, spec, self.ops)

    def mlp(self, layer: int) -> PlainMLP:
        """Return the MLP of a layer."""
        D, F = self.config.hidden_size, self.config.intermediate_size
        down = self.conv1d(layer, self.names.down, D, F, ROW)
        first = self.conv1d(layer, self.names.gate_up[0], F, D, Column(down, "u"))
        return PlainMLP(first, down, activation(self.config.activation, self.ops))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GPT2LMHeadModel and GPTBigCodeForCausalLM from ``weights``. Raises ``unsupported``."""
    if config.raw.get("add_cross_attention"):
        reason = "it has cross-attention to an encoder"
        raise unsupported(config, reason)
    if config.architecture == "GPT2LMHeadModel":
        return GPT2Builder(config, weights).build()
    return GPTBigCodeBuilder(config, weights).build()
