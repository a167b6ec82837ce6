"""Llama, and the builder its relatives share: they differ in biases, head norms and windows only."""

from __future__ import annotations

from collections.abc import Callable

from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.rotary import rotary_tables
from aiakq.runtime.models.decoder import MLP, Block, Decoder, GatedMLP, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """LlamaForCausalLM from ``weights``."""
    attention_bias = bool(config.raw.get("attention_bias", False))
    return build_llama_like(
        config,
        weights,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.raw.get("mlp_bias", False)),
    )


def build_llama_like(
    config: ModelConfig,
    weights: Weights,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    mlp: Callable[[int], MLP] | None = None,
) -> Decoder:
    """A decoder with RMS norms before attention and a gated MLP, under Llama's tensor names.

    ``mlp`` makes another MLP for a layer, by its number.
    """
    D, F, ops = config.hidden_size, config.intermediate_size, weights.ops
    rotary = rotary_tables(config.rope, config.head_dim, config.max_position, ops.device)

    def norm(name: str) -> Norm:
        return ops.rms_norm(weights.tensor(f"{name}.weight", D), config.norm_eps)

    def block(layer: int) -> Block:
        at = f"model.layers.{layer}"
        attention = _attention(config, weights, layer, rotary, qkv_bias, output_bias, head_norms)
        own = gated(at) if mlp is None else mlp(layer)
        return Block(norm(f"{at}.input_layernorm"), attention, norm(f"{at}.post_attention_layernorm"), own)

    def gated(at: str) -> GatedMLP:
        return GatedMLP(
            gate_up=weights.stacked([(f"{at}.mlp.gate_proj", F), (f"{at}.mlp.up_proj", F)], D, bias=mlp_bias),
            down=weights.linear(f"{at}.mlp.down_proj", D, F, bias=mlp_bias),
            act=activation(config.activation, ops),
        )

    tied = config.tie_word_embeddings
    embedding, head = weights.embedding("model.embed_tokens.weight", config.vocab_size, D, tied=tied)
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        blocks=[block(layer) for layer in range(config.num_layers)],
        norm=norm("model.norm"),
        head=weights.linear("lm_head", config.vocab_size, D) if head is None else head,
    )


def _attention(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    rotary: RotaryTables,
    qkv_bias: bool,
    output_bias: bool,
    head_norms: bool,
) -> Attention:
    D, H, Hkv, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    at = f"model.layers.{layer}.self_attn"
    projections = [(f"{at}.q_proj", H * head_dim), (f"{at}.k_proj", Hkv * head_dim), (f"{at}.v_proj", Hkv * head_dim)]
    qkv = weights.stacked(projections, D, bias=qkv_bias)
    output = weights.linear(f"{at}.o_proj", D, H * head_dim, bias=output_bias)
    q_norm, k_norm = (
        weights.tensor(f"{at}.{name}.weight", head_dim) if head_norms else None for name in ("q_norm", "k_norm")
    )
    spec = AttentionSpec(
        num_heads=H,
        num_kv_heads=Hkv,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_window=config.sliding_windows[layer],
        rotary=rotary,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=config.norm_eps,
    )
    return Attention(qkv, output, spec, weights.ops)
