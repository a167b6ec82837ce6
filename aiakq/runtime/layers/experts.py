"""Mixture-of-experts layer: routing, experts and shared experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aiakq.kernels.ops.experts import GroupedExperts, Routed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.routing import BoundRouting, Routing
from aiakq.kernels.types import ActivationLayout, LinearInput


@dataclass
class SparseMLP:
    """Weighted sum of the experts that each token is routed to.

    The result of a token does not depend on other tokens: its experts are summed in a fixed order, in float32.

    count         number of experts.
    shared        shared expert, which every token uses, or None.
    shared_gate   gate of the shared expert, which is weighted by ``sigmoid(shared_gate(x))``; None for no weight.
    weigh_inputs  whether the weight is applied to the input of an expert instead of its output (Llama 4).
    width         intermediate size of an expert.
    hidden        size of its inputs and outputs.
    """

    router: Callable[[Tensor], Tensor]
    experts: GroupedExperts
    count: int
    routing: BoundRouting | Routing
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: LinearLayer | None = None
    weigh_inputs: bool = False
    width: int = 0
    hidden: int = 0

    @property
    def elements_per_token(self) -> int:
        """Number of activations per token that exist at once, beside its input: inputs and outputs of its experts, the
        gate and up projections, and their product.
        """
        return self.routing.top_k * (3 * self.width + 2 * self.hidden)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since rows are sorted by expert first."""
        return None

    def __call__(self, x: LinearInput, scored: Tensor | None = None) -> Tensor:
        """x [T, hidden], a Tensor -> [T, hidden]. ``scored`` [T, hidden] is what the router reads; None for x."""
        assert isinstance(x, Tensor)
        weights, selected = self.routing(self.router(x if scored is None else scored))
        shared = None if self.shared is None else self.shared(x)
        gate = None if shared is None or self.shared_gate is None else self.shared_gate(x)
        return self.experts.output(x, Routed(selected, weights, self.count, self.weigh_inputs), shared, gate)
