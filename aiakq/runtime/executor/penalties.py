"""Penalties for tokens that have occurred: counted per sequence on the host, and applied to all rows of a step at once.

The host knows every token, so counting does not wait for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.row_transforms import Outputs, RowTransform
from aiakq.runtime.protocol.request import RequestSpec


class OccurredTokens(NamedTuple):
    """The tokens of one row that are penalized.

    token_ids  [n] int64, each once.
    counts     [n] float32, how often each occurred in the output; 0: only in the prompt.
    """

    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    repetition: float
    frequency: float
    presence: float


class TokenCounts:
    """How often each token occurred, in arrays that grow."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """token_ids: tokens to list with the count 0."""
        self._place = {token: place for place, token in enumerate(dict.fromkeys(token_ids))}
        size = len(self._place)
        self._token_ids = np.fromiter(self._place, np.int64, size)
        self._counts: NDArray[np.float32] = np.zeros(size, np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        """Count ``tokens``."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._counts):
                more = max(16, place)
                self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
            self._token_ids[place] = token
            self._counts[place] += 1

    def arrays(self, drafts: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the tokens [n] and their counts [n], with ``drafts`` counted in the result only. They may be views,
        which the next ``add`` changes.
        """
        size = len(self._place)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        if drafts:
            counts = counts.copy()
            new: Counter[int] = Counter()
            for token in drafts:
                place = self._place.get(token)
                if place is None:
                    new[token] += 1
                else:
                    counts[place] += 1
            token_ids = np.concatenate([token_ids, np.array(list(new), np.int64)])
            counts = np.concatenate([counts, np.array(list(new.values()), np.float32)])
        return token_ids, counts


class Penalties(RowTransform):
    """``repetition_penalty`` of the prompt and the output, ``frequency_penalty`` and ``presence_penalty`` of output."""

    def __init__(self, spec: RequestSpec) -> None:
        params = spec.sampling
        self._factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._counts = TokenCounts(spec.prompt_token_ids if params.repetition_penalty != 1 else ())
        self._num_counted = 0

    @staticmethod
    def of(spec: RequestSpec) -> Penalties | None:
        params = spec.sampling
        is_neutral = params.repetition_penalty == 1 and not (params.frequency_penalty or params.presence_penalty)
        return None if is_neutral else Penalties(spec)

    def occurred(self, outputs: Outputs) -> OccurredTokens:
        """Return what is penalized behind ``outputs``; those that are no drafts are counted once."""
        known = len(outputs.token_ids) - outputs.num_drafts
        self._counts.add(outputs.token_ids[self._num_counted : known])
        self._num_counted = known
        return OccurredTokens(*self._counts.arrays(outputs.token_ids[known:]), *self._factors)

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        """See RowTransform; logits [V]."""
        penalize(logits.unsqueeze(0), {0: self.occurred(outputs)})


def penalize(logits: Tensor, rows: dict[int, OccurredTokens]) -> None:
    """Apply penalties to ``rows`` of ``logits`` [R, V] float32, contiguous, in place."""
    device, vocab = logits.device, logits.shape[1]
    occurred = list(rows.values())
    of_rows = np.array([each[2:] for each in occurred], np.float32)  # [rows, 3]
    first = np.array(list(rows)) * vocab
    if len(occurred) > 1:
        sizes = [len(each.token_ids) for each in occurred]
        of_rows, first = of_rows.repeat(sizes, axis=0), first.repeat(sizes)
        places = np.concatenate([each.token_ids for each in occurred])
        counts = np.concatenate([each.counts for each in occurred])
    else:
        places, counts = occurred[0].token_ids, occurred[0].counts
    repetition, frequency, presence = of_rows.T
    added = -(frequency * counts + presence) * (counts > 0)
    index, flat = on_device(torch.from_numpy(places + first), device), logits.view(-1)
    added_on_device = on_device(torch.from_numpy(added), device)
    if any(each.repetition != 1 for each in occurred):
        factors = on_device(torch.from_numpy(repetition + np.zeros_like(added)), device)
        values = flat.index_select(0, index)
        flat.index_copy_(0, index, torch.where(values > 0, values / factors, values * factors))
    flat.index_add_(0, index, added_on_device)
