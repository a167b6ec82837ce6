"""Nemotron-H: layers of Mamba 2, of attention without positions, of an MLP and of experts, in any order
(NVIDIA 2025, arXiv:2504.03624).
"""

from __future__ import annotations

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.parallel import REPLICATED, ROW, Column, ExpertRole
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.layers.recurrent import GatedRecurrence
from aiakq.runtime.models.builder import Names, unsupported
from aiakq.runtime.models.decoder import MLP, Decoder, DecoderLayer, MixerBlock, MLPBlock, PlainMLP, Weights
from aiakq.runtime.models.mamba2 import StateSpace
from aiakq.runtime.models.mixture import check_routing, size
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder


class NemotronHBuilder(SharedExpertsBuilder):
    """Blocks of one norm, and a mixer or an MLP without a gate."""

    names = Names(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        norm="backbone.norm_f",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.mlp_bias = bool(config.raw["mlp_bias"])

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer of the kind that the config lists."""
        norm, kind = self.norm(self.layer_name(layer, "norm")), self.config.layer_kinds[layer]
        if kind in ("mlp", "moe"):
            return MLPBlock(norm, self.mlp(layer))
        return MixerBlock(norm, self.mamba(layer) if kind == "linear_attention" else self.attention(layer))

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, as attention has no positions."""
        return None

    def mamba(self, layer: int) -> GatedRecurrence:
        """Return the Mamba 2 layer, whose steps have a lower bound."""
        raw, bias = self.config.raw, bool(self.config.raw["use_bias"])
        sizes = StateSpace(
            heads=size(raw, "mamba_num_heads"),
            head_dim=size(raw, "mamba_head_dim"),
            state=size(raw, "ssm_state_size"),
            groups=size(raw, "n_groups"),
            taps=size(raw, "conv_kernel"),
            bias=bias,
            convolution_bias=bool(raw["use_conv_bias"]),
            output_bias=bias,
            step_limits=(float(raw["time_step_min"]), float("inf")),
        )
        total = sizes.heads * sizes.head_dim
        return sizes.build(self.config, self.weights, self.layer_name(layer, "mixer"), total)

    def mlp(self, layer: int) -> MLP:
        """Return the MLP or the experts of a layer."""
        prefix = self.layer_name(layer, "mixer")
        if self.config.layer_kinds[layer] == "mlp":
            return self.plain(prefix, self.config.intermediate_size)
        return self.mixture(prefix)

    @property
    def act(self) -> Activation:
        """The activation function of MLPs and experts."""
        return activation(str(self.config.raw["mlp_hidden_act"]), self.ops)

    def plain(self, prefix: str, width: int) -> PlainMLP:
        """Return the MLP at ``prefix`` with intermediate size ``width``."""
        D = self.config.hidden_size
        down = self.weights.linear(f"{prefix}.down_proj", D, width, bias=self.mlp_bias, role=ROW)
        up = self.weights.linear(f"{prefix}.up_proj", width, D, bias=self.mlp_bias, role=Column(down, "u"))
        return PlainMLP(up, down, self.act)

    def mixture(self, prefix: str) -> SparseMLP:
        """Return the routed experts at ``prefix`` with the shared one. Raises ``unsupported`` for latents."""
        config, raw, weights, D = self.config, self.raw, self.weights, self.config.hidden_size
        if raw.get("moe_latent_size") is not None:
            raise unsupported(config, f"moe_latent_size is {raw['moe_latent_size']!r:.64}")
        count, width = size(raw, "n_routed_experts"), size(raw, "moe_intermediate_size")
        routing = self.routing(f"{prefix}.gate", count)
        check_routing(routing.top_k, count)
        pairs = [
            (
                weights.linear(f"{prefix}.experts.{each}.up_proj", width, D, role=ExpertRole(each, count)),
                weights.linear(f"{prefix}.experts.{each}.down_proj", D, width, role=ExpertRole(each, count)),
            )
            for each in range(count)
        ]
        return SparseMLP(
            router=weights.dense(weights.tensor(f"{prefix}.gate.weight", count, D), role=REPLICATED),
            experts=self.ops.experts(pairs, self.act, gated=False),
            count=count,
            routing=self.ops.routing(routing, count),
            shared=self.plain(f"{prefix}.shared_experts", size(raw, "moe_shared_expert_intermediate_size")),
            width=width,
            hidden=D,
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """NemotronHForCausalLM from ``weights``."""
    return NemotronHBuilder(config, weights).build()
