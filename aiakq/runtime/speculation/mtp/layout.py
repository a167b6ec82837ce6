"""MtpLayout: where a checkpoint holds its first layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Weights


@dataclass(frozen=True)
class MtpLayout:
    """Names of the parts of the layer.

    layer           prefix of its decoder layer.
    fc              projection of token embedding and hidden state, side by side.
    embedding_norm, hidden_norm  RMS norms of the two.
    norm            RMS norm before the output layer.
    embedding, head  its own copies of the target model's, which need not be there.
    norm_offset     what is added to the weights of the norms.
    masks_first     whether the token embedding at position 0 is zero, as in vLLM.
    hidden_first    whether the hidden state is on the left of the embedding.
    before_norm     whether the target model's hidden states are those before its final norm, as in vLLM.
    """

    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    embedding: str
    head: str
    norm_offset: int = 0
    masks_first: bool = False
    hidden_first: bool = False
    before_norm: bool = False

    def renamed(self, config: ModelConfig) -> Mapping[str, str]:
        """Names of modules that the family's builder asks for, for the last layer of ``config`` -> those in files."""
        return {f"model.layers.{config.num_layers - 1}": self.layer, "model.norm": self.norm, "lm_head": self.head}

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefixes of all of its tensors."""
        return tuple({f"{self.layer}.", *(f"{name}." for name in (self.fc, self.embedding_norm, self.hidden_norm))})


def layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """The published layouts, for a model of ``num_layers``: that of DeepSeek-V3, GLM-4.5 and their descendants, that of
    Qwen3-Next and Qwen3.5, and that of MiMo.
    """
    layer, mimo = f"model.layers.{num_layers}", "model.mtp_layers.0"
    return (
        MtpLayout(
            layer=layer,
            fc=f"{layer}.eh_proj",
            embedding_norm=f"{layer}.enorm",
            hidden_norm=f"{layer}.hnorm",
            norm=f"{layer}.shared_head.norm",
            embedding=f"{layer}.embed_tokens",
            head=f"{layer}.shared_head.head",
            masks_first=True,
        ),
        MtpLayout(
            layer="mtp.layers.0",
            fc="mtp.fc",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            norm="mtp.norm",
            embedding="mtp.embed_tokens",
            head="mtp.lm_head",
            norm_offset=1,
        ),
        MtpLayout(
            layer=mimo,
            fc=f"{mimo}.input_proj",
            embedding_norm=f"{mimo}.token_layernorm",
            hidden_norm=f"{mimo}.hidden_layernorm",
            norm=f"{mimo}.final_layernorm",
            embedding=f"{mimo}.embed_tokens",
            head=f"{mimo}.lm_head",
            masks_first=True,
            hidden_first=True,
            before_norm=True,
        ),
    )


def layout_of(weights: Weights, num_layers: int) -> MtpLayout | None:
    """The layout of the checkpoint of a model of ``num_layers``; None if it has no layer for multi-token prediction."""
    return next(
        (
            layout
            for layout in layouts(num_layers)
            if weights.has(f"{layout.fc}.weight") or weights.is_packed(layout.fc)
        ),
        None,
    )


def with_layer(config: ModelConfig) -> ModelConfig:
    """``config`` with one more layer, of full attention, which is the one for multi-token prediction."""
    return replace(
        config,
        num_layers=config.num_layers + 1,
        layer_kinds=(*config.layer_kinds, "full_attention"),
        sliding_windows=(*config.sliding_windows, None),
    )
