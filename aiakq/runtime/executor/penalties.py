"""Penalties for tokens that have occurred: counted per sequence on the host, and applied to all rows of a step at once,
by the sampler if it can (``CountedRows``).

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

from aiakq.kernels.ops.penalizing import CountedPenalties, PenalizingSampler, RowPenalties
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

    def count(self, token: int) -> tuple[int, float]:
        """Count ``token``; return its place in the arrays and how often it has occurred."""
        place = self._place.get(token)
        if place is None:
            self.add((token,))
            place = self._place[token]
        else:
            self._counts[place] += 1
        return place, self._counts[place]

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
    """``repetition_penalty`` of the prompt and the output, ``frequency_penalty`` and ``presence_penalty`` of output.

    num_counted  tokens of the output that have been counted.
    """

    def __init__(self, spec: RequestSpec) -> None:
        params = spec.sampling
        self._factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._counts = TokenCounts(spec.prompt_token_ids if params.repetition_penalty != 1 else ())
        self._num_prompt, self.num_counted = len(spec.prompt_token_ids), 0
        self._in_sampler: CountedPenalties | None = None

    @staticmethod
    def of(spec: RequestSpec) -> Penalties | None:
        params = spec.sampling
        is_neutral = params.repetition_penalty == 1 and not (params.frequency_penalty or params.presence_penalty)
        return None if is_neutral else Penalties(spec)

    def occurred(self, outputs: Outputs) -> OccurredTokens:
        """Return what is penalized behind ``outputs``; those that are no drafts are counted once."""
        known = len(outputs.token_ids) - outputs.num_drafts
        self._counts.add(outputs.token_ids[self.num_counted : known])
        self.num_counted = known
        return OccurredTokens(*self._counts.arrays(outputs.token_ids[known:]), *self._factors)

    def follow(self, token_ids: list[int]) -> list[tuple[int, float, int]]:
        """Count those of ``token_ids``, of prompt and output, that have not been counted. Returns for each the place in
        the arrays of ``occurred``, how often it has occurred, and the token.
        """
        first = self._num_prompt + self.num_counted
        self.num_counted = len(token_ids) - self._num_prompt
        return [(*self._counts.count(token), token) for token in token_ids[first:]]

    def known(self) -> OccurredTokens:
        """Return what is penalized behind the tokens that have been counted."""
        return OccurredTokens(*self._counts.arrays(), *self._factors)

    def in_sampler(self, sampler: PenalizingSampler, token_ids: list[int]) -> CountedPenalties:
        """Return the counts that ``sampler`` keeps, of ``token_ids``, prompt and output."""
        if self._in_sampler is None:
            self._in_sampler = sampler.new_penalties(token_ids, self._num_prompt, *self._factors)
        else:
            self._in_sampler.count(token_ids)
        return self._in_sampler

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
    added = _added(frequency, presence, counts)
    index, flat = on_device(torch.from_numpy(places + first), device), logits.view(-1)
    added_on_device = on_device(torch.from_numpy(added), device)
    if any(each.repetition != 1 for each in occurred):
        factors = on_device(torch.from_numpy(repetition + np.zeros_like(added)), device)
        values = flat.index_select(0, index)
        flat.index_copy_(0, index, torch.where(values > 0, values / factors, values * factors))
    flat.index_add_(0, index, added_on_device)


class CountedRows:
    """Rows of sequences whose tokens the sampler counts, each without draft tokens."""

    def __init__(self, numbers: list[int], rows: list[tuple[Penalties, list[int]]]) -> None:
        """numbers: of the rows. rows: as in ``PenaltyTable``."""
        self._numbers, self._rows = numbers, rows
        self._token_ids = [token_ids for _, token_ids in rows]
        self._kept: list[CountedPenalties] = []
        self._lengths: list[int] = []
        self._expected: list[int] | None = None

    def penalties(self, sampler: PenalizingSampler) -> RowPenalties:
        """Return the penalties of the rows, for a step of ``sampler``."""
        self._lengths = list(map(len, self._token_ids))
        if self._lengths != self._expected:
            # It is the first step, or not each sequence got one token in a step with these rows.
            kept = [penalties.in_sampler(sampler, token_ids) for penalties, token_ids in self._rows]
            self._kept = self._kept or kept
        self._expected = None
        last = [token_ids[-1] for token_ids in self._token_ids]
        return RowPenalties(self._numbers, self._kept, self._lengths, last)

    def sampled(self) -> None:
        """The step did not fail: the sampler has counted every token."""
        self._expected = [length + 1 for length in self._lengths]


#: Places in a ``PenaltyTable`` for tokens that will occur: at least, and as a share of those that have.
_SPARE, _SPARE_SHARE = 32, 0.125


class PenaltyTable:
    """What is penalized in rows of which each gets one more token per step, kept on the device between steps.

    A row has as many places as tokens have occurred, and spare ones that lead to the element behind all rows.
    """

    def __init__(self, rows: list[tuple[Penalties, list[int]]], vocab: int, device: torch.device) -> None:
        """rows: the penalties of a sequence, and its tokens, prompt and output, to which later ones are appended."""
        self._rows, self._vocab, self._device = rows, vocab, device
        #: Whether the device has what was counted: not after a failure in between, such as lack of memory.
        self._is_complete = True
        self._build()

    def _build(self) -> None:
        for penalties, token_ids in self._rows:
            penalties.follow(token_ids)
        self._num_counted = [penalties.num_counted for penalties, _ in self._rows]
        occurred = [penalties.known() for penalties, _ in self._rows]
        sizes = np.array([len(each.token_ids) for each in occurred])
        capacities = sizes + np.maximum(_SPARE, (sizes * _SPARE_SHARE).astype(np.int64))
        self._ends = np.cumsum(capacities).tolist()
        self._starts = [0, *self._ends[:-1]]
        total, vocab = self._ends[-1], self._vocab
        index = np.full(total, len(occurred) * vocab)
        counts = np.zeros(total, np.float32)
        for row, (start, each) in enumerate(zip(self._starts, occurred, strict=True)):
            end = start + len(each.token_ids)
            np.add(each.token_ids, row * vocab, out=index[start:end])
            counts[start:end] = each.counts
        repetition, frequency, presence = np.array([each[2:] for each in occurred], np.float32).T
        self._frequency, self._presence = frequency, presence
        added = _added(frequency.repeat(capacities), presence.repeat(capacities), counts)
        self._index = on_device(torch.from_numpy(index), self._device)
        self._added = on_device(torch.from_numpy(added), self._device)
        self._factors: Tensor | None = None
        self._values, self._divided, self._multiplied = torch.empty(3, total, device=self._device).unbind()
        if (repetition != 1).any():
            self._factors = on_device(torch.from_numpy(repetition.repeat(capacities)), self._device)
        self._has_large, self._has_small = bool((repetition > 1).any()), bool((repetition < 1).any())

    def follow(self) -> None:
        """Count the tokens that were appended since the last call."""
        places: list[int] = []
        tokens: list[int] = []
        counts: list[float] = []
        rows: list[int] = []
        must_build, self._is_complete = not self._is_complete, False
        for row, (penalties, token_ids) in enumerate(self._rows):
            start = self._starts[row]
            # Others may have counted tokens of the sequence, in steps in which it was not in the table.
            must_build |= penalties.num_counted != self._num_counted[row]
            for place, times, token in penalties.follow(token_ids):
                places.append(start + place)
                tokens.append(row * self._vocab + token)
                counts.append(times)
                rows.append(row)
                must_build |= start + place >= self._ends[row]
            self._num_counted[row] = penalties.num_counted
        if must_build:
            self._build()
        elif places:
            added = _added(self._frequency[rows], self._presence[rows], np.array(counts, np.float32))
            numbers = on_device(torch.from_numpy(np.array([places, tokens])), self._device)
            # In order, so that the last of several counts of a token is kept.
            self._index[numbers[0]] = numbers[1]
            self._added[numbers[0]] = on_device(torch.from_numpy(added), self._device)
        self._is_complete = True

    def penalize(self, logits: Tensor) -> None:
        """Apply the penalties to ``logits`` [R + 1, V] float32, contiguous, in place; the last row is spare."""
        flat = logits.view(-1)
        values = torch.index_select(flat, 0, self._index, out=self._values)
        if self._factors is not None:
            divided = torch.div(values, self._factors, out=self._divided)
            multiplied = torch.mul(values, self._factors, out=self._multiplied)
            # values > 0 are divided, others multiplied: the smaller result for factors above 1. torch.where is slower.
            if not self._has_small:
                torch.minimum(divided, multiplied, out=values)
            elif not self._has_large:
                torch.maximum(divided, multiplied, out=values)
            else:
                torch.where(values > 0, divided, multiplied, out=values)
        flat.scatter_(0, self._index, values.add_(self._added))


def _added(
    frequency: NDArray[np.float32], presence: NDArray[np.float32], counts: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What is added to the logits of tokens that occurred ``counts`` times in the output; [n] each."""
    return -(frequency * counts + presence) * (counts > 0)
