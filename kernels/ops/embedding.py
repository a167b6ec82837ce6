"""Embedding lookup: interface, torch reference and implementations.

An implementation is a module with

    supports(problem: EmbeddingProblem) -> None, or one sentence why not
    prepare(table: Tensor, problem: EmbeddingProblem) -> EmbeddingLayer
    row_selection(problem: EmbeddingProblem) -> RowSelection
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.registry import Registry
from aiakq.kernels.types import EmbeddingProblem

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.embedding",
    {"cpu": "aiakq.kernels.cpu.embedding", "torch": "aiakq.kernels.ops.embedding"},
    plugins_first=True,
)

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


def supports(problem: EmbeddingProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(table: Tensor, problem: EmbeddingProblem) -> TorchEmbedding:
    """Return the reference over ``table`` [V, D], which is not copied."""
    return TorchEmbedding(table, problem.dtype)


def _select(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def row_selection(problem: EmbeddingProblem) -> RowSelection:
    """Return the selection of rows by torch indexing."""
    return _select
