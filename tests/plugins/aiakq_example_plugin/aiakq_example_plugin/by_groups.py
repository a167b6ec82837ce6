"""A kernel of quantized linear layers. It expands one group of inputs at a time, never the whole weight."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearProblem, QWeight

#: Rows that are multiplied at a time.
_ROWS = 16


def supports(problem: LinearProblem) -> str | None:
    """Weight-only schemes on a CPU."""
    if problem.device != "cpu":
        return "it runs on CPUs"
    if problem.scheme not in ("w2a16", "w3a16", "w4a16", "w8a16"):
        return "it takes integers with zero points, and no quantized activations"
    return None


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
        inputs = x if self._weight.perm is None else x[:, self._weight.perm]
        # A few rows at a time: products before their sum are G times as many as outputs.
        return torch.cat([self._few(rows.double()) for rows in inputs.split(_ROWS)]).to(x.dtype)

    def _few(self, rows: Tensor) -> Tensor:
        """rows [R, K] float64, in the order of the codes -> [R, N] float64."""
        weight, size = self._weight, self._weight.group_size
        result = self._bias.expand(len(rows), -1).clone()
        for g, (columns, codes) in enumerate(zip(rows.split(size, 1), weight.codes.split(size, 1), strict=True)):
            zero = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros[:, g, None].double()
            values = (codes.double() - zero) * weight.scales[:, g, None].double()
            # Each row by itself: a matrix product's order of summation may depend on the number of rows.
            result += (values * columns.unsqueeze(1)).sum(-1)
        return result
