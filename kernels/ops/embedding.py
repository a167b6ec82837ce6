"""Embedding lookup: interface, torch reference and implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import EmbeddingProblem

#: ids [T] int64 -> rows [T, D] of the table, in the dtype of the activations.
EmbeddingLayer: TypeAlias = Callable[[Tensor], Tensor]
#: (x [T, D], indices [R] int64) -> the selected rows [R, D].
RowSelection: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class TorchEmbedding:
    """The torch reference; ``table`` [V, D]."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self.table, self.dtype = table, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        return F.embedding(ids, self.table).to(self.dtype)


class EmbeddingKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, table: Tensor, problem: EmbeddingProblem) -> EmbeddingLayer:
        """Bind the lookup in ``table`` [V, D]."""

    def row_selection(self, problem: EmbeddingProblem) -> RowSelection:
        """Bind the selection of rows of activations by index."""


IMPLEMENTATIONS = Implementations[EmbeddingKernel].of_backends("embedding", "cpu")


def prepare(table: Tensor, problem: EmbeddingProblem) -> TorchEmbedding:
    """Return the reference over ``table`` [V, D], which is not copied."""
    return TorchEmbedding(table, problem.dtype)


def _select(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def row_selection(problem: EmbeddingProblem) -> RowSelection:
    """Return the selection of rows by torch indexing."""
    return _select
