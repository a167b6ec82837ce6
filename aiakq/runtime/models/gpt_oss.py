"""GPT-OSS: attention sinks, a sliding window in every second layer, and experts with biases and a clamped SwiGLU
(arXiv:2508.10925).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiakq.formats import mxfp4
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import REPLICATED, ExpertRole
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import DecoderBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.mixture import check_routing, size


class GptOssBuilder(DecoderBuilder):
    """GPT-OSS."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", True))

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, with a sink per head."""
        sinks = self.weights.tensor(self.layer_name(layer, "self_attn.sinks"), self.config.num_heads)
        return replace(super().attention_spec(layer), sinks=sinks.float())

    def mlp(self, layer: int) -> SparseMLP:
        """Return the experts of a layer."""
        raw, prefix, D, F = (
            self.config.raw,
            self.layer_name(layer, "mlp"),
            self.config.hidden_size,
            self.config.intermediate_size,
        )
        count, top_k = size(raw, "num_local_experts"), size(raw, "num_experts_per_tok", "experts_per_token")
        check_routing(top_k, count)
        act = self.ops.activation("clamped_swiglu")
        # Gate and up are interleaved in the outputs.
        order = torch.arange(2 * F, device=self.ops.device).view(F, 2).T.flatten()
        first = self.experts(f"{prefix}.experts.gate_up_proj", count, 2 * F, D, order)
        second = self.experts(f"{prefix}.experts.down_proj", count, D, F, None)
        router = self.weights.dense(
            self.weights.tensor(f"{prefix}.router.weight", count, D),
            self.weights.tensor(f"{prefix}.router.bias", count),
            role=REPLICATED,
        )
        experts = self.ops.experts(list(zip(first, second, strict=True)), act)
        routing = self.ops.routing(SoftmaxRouting(top_k, normalize=True), count)
        return SparseMLP(router, experts, count, routing, width=F, hidden=D)

    def experts(self, name: str, count: int, n: int, k: int, order: Tensor | None) -> list[LinearLayer]:
        """Return a linear layer with N outputs and K inputs per expert; ``order`` [N] permutes the outputs."""
        weights, biases = self.weights, self.weights.tensor(f"{name}_bias", count, n)
        roles = [ExpertRole(number, count) for number in range(count)]
        if weights.has(f"{name}_blocks"):
            groups = k // mxfp4.GROUP
            blocks = weights.tensor(f"{name}_blocks", count, n, groups, mxfp4.GROUP // 2, dtype=torch.uint8)
            scales = weights.tensor(f"{name}_scales", count, n, groups, dtype=torch.uint8)
            experts = mxfp4.read_experts(blocks, scales, biases, name, order)
            return [weights.quantized([expert], role) for expert, role in zip(experts, roles, strict=True)]
        packed = weights.packed_experts(name)
        if packed is not None:
            ordered = biases if order is None else biases[:, order]
            experts = (each.with_bias(bias) for each, bias in zip(packed, ordered, strict=True))
            return [weights.quantized([expert], role) for expert, role in zip(experts, roles, strict=True)]
        # Stored as [E, K, N].
        layers = [(each.T, bias) for each, bias in zip(weights.tensor(name, count, k, n), biases, strict=True)]
        if order is not None:
            layers = [(weight[order], bias[order]) for weight, bias in layers]
        return [
            weights.dense(weight.contiguous(), bias, role=role)
            for (weight, bias), role in zip(layers, roles, strict=True)
        ]


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GptOssForCausalLM from ``weights``. Raises ``unsupported`` for another clamp."""
    raw = config.raw
    limits = float(raw["swiglu_limit"]), float(raw["swiglu_alpha"])
    if limits != (7.0, 1.702):
        reason = f"its SwiGLU has the limit {limits[0]} and the factor {limits[1]}"
        raise unsupported(config, reason)
    return GptOssBuilder(config, weights).build()
