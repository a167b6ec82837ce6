"""Embeddings of Gemma 3n, whose tables have no rows for the tokens of images and sounds, or others than are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.scaling import Scaling


@dataclass
class PartialTable:
    """A table of fewer rows than there are tokens, of which the others have the row of token 0.

    table  embedding of ``rows`` rows.
    """

    table: EmbeddingLayer
    rows: int

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, D]."""
        return self.table(torch.where(token_ids < self.rows, token_ids, 0))


@dataclass
class MediaTable:
    """Scaled rows of a table, and other rows for the last tokens, which stand for parts of images and sounds.

    table  embedding of all tokens.
    scale  factor on its rows.
    first  the first of the last tokens.
    rows   of these, [N, D].
    """

    table: EmbeddingLayer
    scale: Scaling
    first: int
    rows: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, D]."""
        scaled, number = self.scale(self.table(token_ids)), token_ids - self.first
        return torch.where(number[:, None] < 0, scaled, self.rows[number.clamp(min=0)])
