"""Samplers that count the tokens of sequences and apply penalties themselves: interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.ops.sampling import ModifiedLogits, PendingSamples, SampleRow, TokenMasks


class CountedPenalties(Protocol):
    """The penalties of one sequence and how often each of its tokens has occurred, kept by a ``PenalizingSampler``."""

    def count(self, token_ids: Sequence[int]) -> None:
        """Count those of ``token_ids``, all tokens of the sequence, that have not been counted."""


class RowPenalties(NamedTuple):
    """Penalties that the sampler applies: those of row ``rows[i]`` are ``penalties[i]``.

    Lists that are the same objects as in the call before are taken to be unchanged.

    lengths    of the sequences [n]: the last token is counted if it has not been; all before it have.
    last       their last tokens [n].
    """

    rows: list[int]
    penalties: list[CountedPenalties]
    lengths: list[int]
    last: list[int]


@runtime_checkable
class PenalizingSampler(Protocol):
    """A ``Sampler`` that counts tokens and applies penalties itself, behind ``modified`` and before ``masks``."""

    def new_penalties(
        self, token_ids: Sequence[int], num_prompt: int, repetition: float, frequency: float, presence: float
    ) -> CountedPenalties:
        """Return the penalties of a sequence with ``token_ids``, of which the first ``num_prompt`` are its prompt."""

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        uniforms: Sequence[float] | NDArray[np.float64] = (),
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
        penalties: RowPenalties | None = None,
    ) -> PendingSamples:
        """See Sampler."""
