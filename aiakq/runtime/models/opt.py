"""OPT: layer norms, learned positions, plain ReLU MLP, biases everywhere (Zhang et al. 2022, arXiv:2205.01068)."""

from __future__ import annotations

from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.models.decoder import Block, Decoder, PlainMLP, Weights

#: Rows before position 0 in the table of learned positions.
POSITION_OFFSET = 2


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OPTForCausalLM from ``weights``."""
    raw, ops = config.raw, weights.ops
    D, F, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    width = raw.get("word_embed_proj_dim", D)
    bias = bool(raw.get("enable_bias", True))
    norm_first = bool(raw.get("do_layer_norm_before", True))

    def norm(name: str) -> Norm:
        return ops.layer_norm(weights.tensor(f"{name}.weight", D), weights.tensor(f"{name}.bias", D), config.norm_eps)

    def block(layer: int) -> Block:
        at = f"model.decoder.layers.{layer}"
        attention = Attention(
            qkv=weights.stacked(
                [(f"{at}.self_attn.{name}", D) for name in ("q_proj", "k_proj", "v_proj")], D, bias=bias
            ),
            output=weights.linear(f"{at}.self_attn.out_proj", D, D, bias=bias),
            spec=AttentionSpec(config.num_heads, config.num_heads, head_dim, head_dim**-0.5),
            ops=ops,
        )
        mlp = PlainMLP(
            first=weights.linear(f"{at}.fc1", F, D, bias=bias),
            second=weights.linear(f"{at}.fc2", D, F, bias=bias),
            act=activation(config.activation, ops),
        )
        return Block(norm(f"{at}.self_attn_layer_norm"), attention, norm(f"{at}.final_layer_norm"), mlp, norm_first)

    tied = config.tie_word_embeddings
    embedding, head = weights.embedding("model.decoder.embed_tokens.weight", config.vocab_size, width, tied=tied)
    positions = weights.tensor("model.decoder.embed_positions.weight", config.max_position + POSITION_OFFSET, D)
    narrow = width != D
    final_norm = norm_first and not raw.get("_remove_final_layer_norm", False)
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        blocks=[block(layer) for layer in range(config.num_layers)],
        norm=norm("model.decoder.final_layer_norm") if final_norm else None,
        head=weights.linear("lm_head", config.vocab_size, width) if head is None else head,
        positions=ops.embedding(positions[POSITION_OFFSET:]),
        project_in=weights.linear("model.decoder.project_in", D, width) if narrow else None,
        project_out=weights.linear("model.decoder.project_out", width, D) if narrow else None,
    )
