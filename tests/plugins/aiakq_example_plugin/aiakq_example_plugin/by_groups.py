"""A kernel of quantized linear layers. It expands one group of inputs at a time, never the whole weight."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearProblem, QWeight


def supports(problem: LinearProblem) -> str | None:
    """Weight-only schemes on a CPU."""
    if problem.device != "cpu":
        return "it runs on CPUs"
    return "it takes no quantized activations" if problem.scheme == "w8a8" else None


def prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer:
    """Keep the canonical layout. ``weight`` is not modified."""
    return LinearByGroups(weight)


class LinearByGroups(LinearLayer):
    """x @ W.T + bias in float64, which is rounded once."""

    def __init__(self, weight: QWeight) -> None:
        self._weight = weight
        bias = weight.bias
        self._bias = torch.zeros(weight.n, dtype=torch.float64) if bias is None else bias.double()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        weight, size = self._weight, self._weight.group_size
        inputs = x if weight.perm is None else x[:, weight.perm]
        result = self._bias.expand(len(x), -1).clone()
        for g, (columns, codes) in enumerate(zip(inputs.split(size, 1), weight.codes.split(size, 1), strict=True)):
            zero = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros[:, g, None].double()
            # Rows are summed one by one: a matrix product's order of summation may depend on their number.
            part = ((codes.double() - zero) * weight.scales[:, g, None].double()).unsqueeze(
                0
            ) * columns.double().unsqueeze(1)
            result += part.sum(-1)
        return result.to(x.dtype)
