"""MixtureOps: how ``Ops`` binds the operations of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aiakq.kernels.ops import experts, routing
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.experts import ExpertLayers, GroupedExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.routing import BoundRouting, Routing
from aiakq.kernels.selection import Implementations, Kernel, KernelProblem
from aiakq.kernels.types import ExpertsProblem, RoutingProblem

#: See REGISTRIES in kernels/ops/__init__.py.
MIXTURES: dict[str, Implementations[Any]] = {
    "routing": routing.IMPLEMENTATIONS,
    "experts": experts.IMPLEMENTATIONS,
}


class MixtureOps:
    """The part of ``Ops`` that only mixtures of experts need."""

    dtype: torch.dtype
    device_type: str

    @property
    def row_multiple(self) -> int:
        """See Ops."""
        raise NotImplementedError

    def _bind(
        self, implementations: Implementations[Kernel], problem: KernelProblem, kind: str = "", count: int = 1
    ) -> Kernel:
        raise NotImplementedError

    def activation(self, name: str) -> Activation:
        """See Ops."""
        raise NotImplementedError

    def routing(self, rule: Routing, count: int) -> BoundRouting:
        """Bind the routing of tokens to ``count`` experts."""
        problem = RoutingProblem(rule.kind, count, self.dtype, self.device_type)
        return BoundRouting(rule, self._bind(routing.IMPLEMENTATIONS, problem).prepare(rule, problem))

    def experts(
        self, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation, gated: bool = True
    ) -> GroupedExperts:
        """Bind MLPs of equal sizes, a (first, second) pair of layers each, applied to their own rows."""
        return self._experts_from(0, pairs, act, gated)

    def _experts_from(
        self, start: int, pairs: Sequence[tuple[LinearLayer, LinearLayer]], act: Activation, gated: bool
    ) -> GroupedExperts:
        """Bind the experts of a mixture from number ``start`` on."""
        first, second = [first for first, _ in pairs], [second for _, second in pairs]
        problem = ExpertsProblem(self.dtype, self.device_type)
        layers = ExpertLayers(first, second, act, self.row_multiple, start, gated)
        return self._with_sigmoid(self._bind(experts.IMPLEMENTATIONS, problem).prepare(layers, problem))

    def _with_sigmoid(self, grouped: GroupedExperts) -> GroupedExperts:
        """Give ``grouped`` the sigmoid of a CPU's kernels, which compute it inside of a mixture where they can."""
        if self.device_type == "cpu":
            grouped.sigmoid = self.activation("sigmoid")
        return grouped
