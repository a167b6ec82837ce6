"""Families with dense layers first, then layers with routed and shared experts: DeepSeek and its descendants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.routing import Routing, SigmoidRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Weights
from aiakq.runtime.models.mixture import Mixture, size
from aiakq.runtime.models.qwen2_moe import gated

#: Added to the sum of a token's weights, which is smaller where the scores of all its experts are below -46.
_EPSILON = 1e-20


class SharedExpertsBuilder(DecoderBuilder):
    """Layers with experts from ``first_k_dense_replace`` on, routed as in DeepSeek-V3 (arXiv:2412.19437).

    defaults      default values of settings that are missing in config.json.
    experts_name  name of the module with router and experts.
    expert_names  names of an expert's gate, up and down projection.
    expert_limit  bound inside the experts, see Mixture.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 1}
    experts_name: ClassVar[str] = "mlp"
    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    expert_limit: float | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.raw = {**self.defaults, **{name: value for name, value in config.raw.items() if value is not None}}

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts, or a dense MLP in the first layers."""
        config, raw, prefix = self.config, self.raw, self.layer_name(layer, self.experts_name)
        if self.is_dense(layer):
            return super().mlp(layer)
        count, width = size(raw, "n_routed_experts"), size(raw, "moe_intermediate_size")
        routing = self.routing(f"{prefix}.gate", count)
        mixture = Mixture(prefix, prefix, self.expert_names, count, width, routing, limit=self.expert_limit)
        sparse = mixture.build(config, self.weights)
        shared = width * (raw.get("n_shared_experts") or 1)
        sparse.shared = self.shared_experts(f"{prefix}.shared_experts", shared)
        return sparse

    def shared_experts(self, name: str, width: int) -> MLP | None:
        """Return the module ``name`` with the shared experts, one MLP with an intermediate size ``width``; None in
        families without.
        """
        return gated(self.config, self.weights, name, width, self.mlp_bias)

    def listed(self, key: str, kinds: Any, meanings: Mapping[str, bool]) -> list[bool]:
        """Return what the kind of each layer in the list ``kinds`` means. Raises ``model_malformed``."""
        layers = self.config.num_layers
        if not isinstance(kinds, list | str) or len(kinds) != layers or any(kind not in meanings for kind in kinds):
            raise malformed(key, kinds, f"{layers} times one of {', '.join(meanings)}")
        return [meanings[kind] for kind in kinds]

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        return bool(layer < self.raw["first_k_dense_replace"])

    def routing(self, router: str, count: int) -> Routing:
        """Return the routing of the module ``router`` over ``count`` experts. Raises ``model_malformed``."""
        raw, groups = self.raw, self.groups
        if count // groups[0] < 2:  # a group's score is that of its two best experts
            reason = f"n_group is {groups[0]}, with {count} experts"
            raise error("model_malformed", file="config.json", reason=reason)
        correction = f"{router}.e_score_correction_bias"
        return SigmoidRouting(
            top_k=size(raw, "num_experts_per_tok"),
            normalize=bool(raw.get("norm_topk_prob", True)),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            sigmoid=self.ops.activation("sigmoid"),
            correction=self.weights.tensor(correction, count, dtype=torch.float32),
            groups=groups,
            epsilon=_EPSILON,
        )

    @property
    def groups(self) -> tuple[int, int]:
        """Number of expert groups, and number of groups that a token's experts may be in.

        Raises ``model_malformed``.
        """
        count = size(self.raw, "n_routed_experts")
        groups, chosen = (
            1 if self.raw.get(name) is None else size(self.raw, name) for name in ("n_group", "topk_group")
        )
        if count % groups or chosen > groups:
            reason = f"n_group is {groups} and topk_group is {chosen}, with {count} experts"
            raise error("model_malformed", file="config.json", reason=reason)
        return groups, chosen
