"""Weight names and config fields of the families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aiakq.errors import error
from aiakq.formats.config_values import SIZE, read_value
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import REPLICATED, ExpertRole
from aiakq.kernels.ops.routing import Routing
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import ClampedActivation, activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Weights


def check_routing(top_k: int, count: int) -> None:
    """Raise ``model_malformed`` if ``top_k`` exceeds the number of experts."""
    if top_k > count:
        reason = f"a token is routed to {top_k} of {count} experts"
        raise error("model_malformed", file="config.json", reason=reason)


def size(raw: Mapping[str, object], *names: str) -> int:
    """Return a positive integer of config.json under the first of ``names`` it has. Raises ``model_malformed``."""
    return int(read_value(raw, SIZE, *names))


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer.

    prefix   name of the module with router and experts in checkpoints on the hub.
    inside   its name in transformers' model class, whose files may store all experts in two tensors.
    names    names of an expert's gate, up and down projection.
    count    number of experts.
    width    intermediate size of an expert.
    routing  selection of experts.
    router   name of the router in the module.
    limit    bound of gates and of what they are multiplied with, see ClampedActivation; None for no bound.
    """

    prefix: str
    inside: str
    names: tuple[str, str, str]
    count: int
    width: int
    routing: Routing
    router: str = "gate"
    limit: float | None = None

    def build(self, config: ModelConfig, weights: Weights) -> SparseMLP:
        """Build router and experts from one tensor per projection, or fused tensors. Raises ``model_malformed``."""
        check_routing(self.routing.top_k, self.count)
        D, act = config.hidden_size, activation(config.activation, weights.ops)
        act = act if self.limit is None else ClampedActivation(act, self.limit)
        fused = weights.has(f"{self.inside}.experts.gate_up_proj")
        prefix = self.inside if fused else self.prefix
        if fused:
            experts = self._fused(prefix, D, weights)
        else:
            experts = separate_experts(weights, prefix, self.names, self.count, (D, self.width))
        return SparseMLP(
            router=weights.dense(weights.tensor(f"{prefix}.{self.router}.weight", self.count, D), role=REPLICATED),
            experts=weights.ops.experts(experts, act),
            count=self.count,
            routing=weights.ops.routing(self.routing, self.count),
            width=self.width,
            hidden=D,
        )

    def _fused(self, prefix: str, D: int, weights: Weights) -> list[tuple[LinearLayer, LinearLayer]]:
        both = _either_way(weights, f"{prefix}.experts.gate_up_proj", self.count, 2 * self.width, D)
        down = _either_way(weights, f"{prefix}.experts.down_proj", self.count, D, self.width)
        return fused_experts(weights, both, down)


def _either_way(weights: Weights, name: str, count: int, n: int, k: int) -> Tensor:
    """Return a tensor [E, N, K], which files of Qwen3-VL-MoE may have as [E, K, N]. Raises ``tensor_mismatch``."""
    if not weights.has_shape(name, count, n, k) and weights.has_shape(name, count, k, n):
        return weights.tensor(name, count, k, n).transpose(1, 2)
    return weights.tensor(name, count, n, k)


def separate_experts(
    weights: Weights, prefix: str, names: tuple[str, str, str], count: int, sizes: tuple[int, int]
) -> list[tuple[LinearLayer, LinearLayer]]:
    """Return the layers of ``count`` experts, which have a tensor for each projection.

    prefix  name of the module with router and experts.
    names   of an expert's gate, up and down projection.
    sizes   D of the inputs and F of the projections between.
    """
    D, width = sizes
    layers = []
    for number in range(count):
        gate, up, down = (f"{prefix}.experts.{number}.{name}" for name in names)
        role = ExpertRole(number, count)
        both = weights.stacked([(gate, width), (up, width)], D, role=role)
        layers.append((both, weights.linear(down, D, width, role=role)))
    return layers


def fused_experts(weights: Weights, both: Tensor, down: Tensor) -> list[tuple[LinearLayer, LinearLayer]]:
    """Return the layers of experts: the fused gate and up projections ``both`` [E, 2 F, D], and ``down`` [E, D, F]."""
    roles = [ExpertRole(number, len(both)) for number in range(len(both))]
    return [
        (weights.dense(first.contiguous(), role=role), weights.dense(second.contiguous(), role=role))
        for first, second, role in zip(both, down, roles, strict=True)
    ]
