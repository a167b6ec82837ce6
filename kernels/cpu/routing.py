"""Routing of a mixture in one native operation; see src/routing_kernel.cpp.

Experts are selected as the torch reference does, also where scores are equal or NaN. A softmax is computed in float64,
and so may differ from torch's in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import threads_for
from aiakq.kernels.ops.routing import Routing, SigmoidRouting, SoftmaxRouting, SparseMixerRouting, TopSigmoidRouting
from aiakq.kernels.types import RoutingProblem

#: Kinds of Routing -> the RoutingFunction of src/ops.def.
_FUNCTIONS = {
    "softmax": "BY_SOFTMAX",
    "sigmoid": "BY_SIGMOID",
    "top_sigmoid": "TOP_SIGMOID",
    "sparse_mixer": "SPARSE_MIXER",
}


def supports(problem: RoutingProblem) -> str | None:
    """Return None, or why not."""
    if problem.kind not in _FUNCTIONS:
        return f"it has no routing of the kind {problem.kind!r}"
    most = library.load_library().constants["MAX_EXPERTS"]
    return f"it routes to at most {most} experts" if problem.experts > most else None


def prepare(routing: Routing, problem: RoutingProblem) -> NativeRouting:
    """Return the routing of one layer."""
    return NativeRouting(routing, problem.experts)


class NativeRouting:
    """Native routing; the interface is Router in ops/routing.py."""

    def __init__(self, routing: Routing, experts: int) -> None:
        self.op = op = library.new_op("routing")
        op.experts, op.top_k = experts, routing.top_k
        op.function = library.load_library().constants[_FUNCTIONS[routing.kind]]
        op.groups = op.kept_groups = 1
        op.scale = 1.0
        self._correction: Tensor | None = None
        if isinstance(routing, SoftmaxRouting | SigmoidRouting):
            op.normalize, op.scale = routing.normalize, routing.scale
            op.groups, op.kept_groups = routing.groups
            if routing.correction is not None:
                self._correction = routing.correction.float().contiguous()
            op.correction = library.address(self._correction)
        if isinstance(routing, SoftmaxRouting):
            op.smallest_sum = routing.smallest_sum
        elif isinstance(routing, SigmoidRouting):
            op.epsilon = routing.epsilon
        elif isinstance(routing, SparseMixerRouting):
            op.distance = 2 * routing.jitter
        else:
            assert isinstance(routing, TopSigmoidRouting)
        self.ops = library.OpList(op)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E] -> weights [T, A] float32 and expert indices [T, A] int64; see Routing."""
        op = self.op
        if scores.dim() != 2 or scores.shape[1] != op.experts or scores.stride(1) != 1:
            raise ValueError(f"scores {list(scores.shape)} of {op.experts} experts")
        m = len(scores)
        weights = torch.empty(m, op.top_k, dtype=torch.float32)
        selected = torch.empty(m, op.top_k, dtype=torch.int64)
        with self.ops.lock:
            op.m, op.type = m, TYPES[scores.dtype]
            op.scores, op.scores_stride = scores.data_ptr(), scores.stride(0)
            op.selected, op.weights = selected.data_ptr(), weights.data_ptr()
            self.ops(threads_for(scores.numel()))
        return weights, selected
