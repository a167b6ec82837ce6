"""Batches of linear layers, each applied to its own columns: interface, torch reference and implementations.

Used by latent attention, where every head has its own weight (runtime/layers/latent_attention.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import BatchedProblem


class BatchedLinear(Protocol):
    """y[:, b] = x[:, b] W[b]^T with float weights W [B, N, K]."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, B, K] -> [M, B, N] of the same dtype, written to ``out`` if given; the last dimension is contiguous."""


class TorchBatched:
    """The reference; ``weight`` [B, N, K] is in the dtype of the activations."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, B, K] -> [M, B, N]; see BatchedLinear."""
        y = torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        return y if out is None else out.copy_(y)


class BatchedKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, weight: Tensor, problem: BatchedProblem) -> BatchedLinear:
        """Bind a batch of layers with ``weight`` [B, N, K]."""


IMPLEMENTATIONS = Implementations[BatchedKernel].of_backends("batched", "cpu")


def prepare(weight: Tensor, problem: BatchedProblem) -> TorchBatched:
    """Return the reference; ``weight`` [B, N, K] is copied only if it needs another dtype."""
    return TorchBatched(weight.to(problem.dtype))
