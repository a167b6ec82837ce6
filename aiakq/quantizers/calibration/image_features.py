"""ImageFeatures: embeddings of calibration images, and with what a model is called where tokens stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

#: How blocks see tokens of images: as those of text; with three positions, of which two are their place in the image
#: (M-RoPE); or attending to all others of their image.
ImageKind = Literal["plain", "grid", "whole"]


@dataclass(frozen=True)
class ImageFeatures:
    """Embeddings of all images, of which row r has the id V + r in samples, beside V tokens.

    embeddings  [1 + L, R, hidden] float32; what follows the first is added to the outputs of the first L blocks.
    places      row and column of each in its image, [R, 2] int64; for the kind "grid" only.
    """

    embeddings: Tensor
    vocab_size: int
    kind: ImageKind = "plain"
    places: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Return what ``of_tensors`` needs besides numbers and names."""
        return [self.embeddings, *([] if self.places is None else [self.places])]

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor], vocab_size: int, kind: str) -> ImageFeatures:
        """Return the features whose ``tensors`` these are."""
        return ImageFeatures(tensors[0], vocab_size, msgspec.convert(kind, ImageKind), *tensors[1:])

    def mask(self, ids: Tensor) -> Tensor:
        """Return which of the ids stand for embeddings of images."""
        return ids >= self.vocab_size

    def as_text(self, ids: Tensor) -> Tensor:
        """Return the ids with tokens in place of images."""
        return ids.masked_fill(self.mask(ids), 0)

    def arguments(self, ids: Tensor, embedding: nn.Module) -> dict[str, Tensor]:
        """Return what the model is called with for ids [B, T] of which some stand for images."""
        mask = self.mask(ids)
        embeddings: Tensor = embedding(self.as_text(ids))
        rows = self.embeddings[0].to(embeddings)[ids[mask] - self.vocab_size]
        given = {"inputs_embeds": embeddings.masked_scatter(mask[..., None], rows)}
        if self.kind == "grid":
            given["position_ids"] = torch.stack([self._positions(row) for row in ids.tolist()], dim=1).to(ids.device)
        if self.kind == "whole":
            given["token_type_ids"] = mask.long()
        return given

    def added(self, ids: Tensor) -> AddedRows | None:
        """Return what is added to outputs of blocks for ids [B, T]; None for nothing."""
        mask = self.mask(ids)
        if len(self.embeddings) == 1 or not bool(mask.any()):
            return None
        return AddedRows(self.embeddings[1:], mask, ids[mask] - self.vocab_size)

    def _positions(self, ids: Sequence[int]) -> Tensor:
        """Return the three positions of each of ``ids``, [3, T] int64.

        Those of an image are where it begins, and as many more as its row and its column; the text behind it goes on
        at the first position that is larger than all of these (Wang et al. 2024, arXiv:2409.12191).
        """
        assert self.places is not None
        places = self.places.tolist()
        positions, start, behind = [], 0, 0
        for token in ids:
            row, column = (0, 0) if token < self.vocab_size else places[token - self.vocab_size]
            if (row, column) == (0, 0):  # text, or the beginning of an image
                start = behind
            positions.append((start, start + row, start + column))
            behind = max(behind, start + max(row, column) + 1)
        return torch.tensor(positions, dtype=torch.int64).T


@dataclass(frozen=True)
class AddedRows:
    """What is added to the outputs of the first blocks at tokens of images (DeepStack, Meng et al. 2024,
    arXiv:2406.04334).

    embeddings  [L, R, hidden], block by block.
    mask        tokens of a batch to which it is added, [B, T] bool.
    rows        the row of each of these, int64.
    """

    embeddings: Tensor
    mask: Tensor
    rows: Tensor

    def to_output(self, output: Tensor, index: int) -> Tensor:
        """Return the output [B, T, hidden] of block ``index`` as the next block gets it."""
        if index >= len(self.embeddings):
            return output
        rows = self.embeddings[index][self.rows.to(self.embeddings.device)].to(output)
        changed = output.clone()
        changed[self.mask.to(output.device)] += rows
        return changed


def is_alone(features: ImageFeatures | None, ids: Tensor) -> bool:
    """Whether blocks are called with other positions or masks for ``ids``, [T] or [B, T], or get more, than for text
    as long, so that a sample is a batch of its own."""
    if features is None or (features.kind == "plain" and len(features.embeddings) == 1):
        return False
    return bool(features.mask(ids).any())
