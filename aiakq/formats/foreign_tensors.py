"""ForeignTensors: the tensors of a model that is stored in another form, in Hugging Face's names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aiakq.formats.expert_stack import ExpertStack
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.types import QWeight


class ForeignTensors(Protocol):
    """What a checkpoint reads instead of shards, if its folder was made from something else (made_folder.py).

    inventory  name -> header of every tensor.
    """

    inventory: dict[str, TensorInfo]

    @property
    def source(self) -> Path:
        """What the user calls the model."""

    @property
    def folder(self) -> Path:
        """The folder of the files that the inventory names."""

    def remark(self) -> str:
        """Return what to tell the user about how tensors are read; empty for nothing."""

    def read_with(self, mapped: bool, threads: int, dtype: torch.dtype) -> None:
        """Set how tensors are read, see ``Checkpoint.read_with``."""

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises KeyError for an unknown name, ``model_malformed``, ``not_finite``."""

    def blocks(self, name: str) -> QWeight | None:
        """Return a packed linear [N, K] whose rows are not read yet; None for another tensor."""

    def table(self, name: str) -> QWeight | None:
        """Return a matrix [V, D] of floats as the blocks in which it is stored; None if it is not."""

    def experts(self, name: str) -> Iterator[QWeight] | None:
        """Yield the linears [N, K] of the experts stacked in a tensor; None if they are not stored as blocks."""

    @property
    def stacked_experts(self) -> Sequence[ExpertStack]:
        """What ``experts`` yields, by tensor."""

    def changed_files(self) -> list[str]:
        """Return the files that were written, replaced or removed since they were opened."""

    def close(self) -> None:
        """Close the files; tensors that were read remain valid."""
