"""Draft lengths: how many draft tokens of each sequence pay, from the time of steps and the acceptance of sequences."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise

#: Acceptance above which a rate does not rise: draft tokens that cost more than this are not worth a try.
MAX_RATE = 0.98
#: Weight of the observations so far when a new one comes in: about the last eight draft tokens count.
_DECAY = 0.8
#: Draft tokens that the initial rate of a sequence counts as.
_PRIOR_TOKENS = 2.0


class StepCosts:
    """The time of a step by its number of tokens, interpolated between measurements, and extrapolated beyond them.

    seconds        by number of tokens, 1 among them. More tokens may take less time than fewer, as
                   kernels compute several rows at a time, but not less than one.
    draft_seconds  that a model takes to propose one draft token for one sequence; 0: proposals cost nothing.
    bookkeeping    seconds that the engine takes longer for a sequence with draft tokens.
    """

    def __init__(self, seconds: Mapping[int, float], draft_seconds: float = 0.0, bookkeeping: float = 0.0) -> None:
        self._known = [(tokens, max(seconds[tokens], seconds.get(1, 0.0))) for tokens in sorted(seconds)]
        if self._known[0][0] != 1:
            raise ValueError("the time of a step with one token is missing")
        self._draft = draft_seconds / (self._known[0][1] or 1.0)
        self.bookkeeping = bookkeeping
        self._table = [0.0]
        self._min_acceptance: dict[tuple[int, int, int, bool], float] = {}

    def with_bookkeeping(self, step: float, drafts: float) -> StepCosts:
        """The same with what the engine itself takes: seconds in every step, and more for a sequence with drafts."""
        draft = self._draft * self._known[0][1]
        return StepCosts({tokens: step + seconds for tokens, seconds in self._known}, draft, drafts)

    def step(self, tokens: int) -> float:
        """Seconds of a step of ``tokens``."""
        while tokens >= len(self._table):
            self._table.append(self._interpolated(len(self._table)))
        return self._table[tokens]

    def proposal(self, sequences: int) -> float:
        """Seconds to propose one more draft token for each of ``sequences``: their number slows a draft model as it
        slows the target model.
        """
        return self._draft * self.step(sequences) if self._draft else 0.0

    def min_acceptance(self, tokens: int, decodes: int, length: int, with_proposals: bool = False) -> float:
        """Acceptance, to a hundredth, from which on some of up to ``length`` draft tokens of each decode pay in a step
        of ``tokens``; 1.0 where none pays at MAX_RATE either, or there is no decode. See ``choose_lengths``.
        """
        if decodes == 0:
            return 1.0
        key = tokens, decodes, length, with_proposals
        if key not in self._min_acceptance:
            if len(self._min_acceptance) > 1024:
                self._min_acceptance.clear()
            limits = [length] * decodes

            def pays(hundredths: int) -> bool:
                rates = [hundredths / 100] * decodes
                return any(choose_lengths(self, tokens, decodes, rates, limits, length * decodes, with_proposals))

            found = bisect.bisect_left(range(round(100 * MAX_RATE) + 1), True, key=pays)
            self._min_acceptance[key] = found / 100 if found <= 100 * MAX_RATE else 1.0
        return self._min_acceptance[key]

    def _interpolated(self, tokens: int) -> float:
        known = self._known
        for (fewer, short), (more, long) in pairwise(known):
            if tokens <= more:
                return short + (long - short) * (tokens - fewer) / (more - fewer)
        if len(known) == 1:
            return known[0][1]
        more, long = known[-1]
        fewer, short = next(one for one in reversed(known) if one[0] <= more // 2)
        return long + max(0.0, long - short) * (tokens - more) / (more - fewer)


#: Where nothing was measured: a step that is bound by memory bandwidth up to a few tokens.
DEFAULT_COSTS = StepCosts({1: 1.0, 2: 1.06, 4: 1.2, 8: 1.6, 16: 3.0})


class AcceptanceRate:
    """The probability that a draft token is accepted, given that those before it were: a decaying average."""

    __slots__ = ("_accepted", "_tested")

    def __init__(self, initial: float = 0.5, weight: float = _PRIOR_TOKENS) -> None:
        self._accepted, self._tested = initial * weight, weight

    @property
    def value(self) -> float:
        """The rate, at most MAX_RATE."""
        return min(MAX_RATE, self._accepted / self._tested)

    def observe(self, num_drafts: int, num_accepted: int, decay: float = _DECAY) -> None:
        """Of ``num_drafts`` draft tokens the first ``num_accepted`` were accepted; those after a rejected one say
        nothing.
        """
        self._accepted = decay * self._accepted + num_accepted
        self._tested = decay * self._tested + min(num_drafts, num_accepted + 1)


def choose_lengths(
    costs: StepCosts,
    num_tokens: int,
    num_decodes: int,
    rates: Sequence[float],
    limits: Sequence[int],
    max_total: int,
    with_proposals: bool = False,
) -> list[int]:
    """For each sequence the draft length with which a step brings the most tokens per second; 0 where none pays.

    num_tokens   of the step without draft tokens, ``num_decodes`` of which are decodes.
    rates        acceptance of each sequence's draft tokens.
    limits       maximum draft length of each.
    max_total    draft tokens in all.
    with_proposals  whether the time of a draft model counts: what it proposed already is free.

    A draft token adds the probability that it and all before it are accepted. In the order of these gains, the most
    likely first, tokens are added as long as the rate rises: that is the joint optimum, as gains fall along a sequence.
    """
    gains: list[tuple[float, int, int]] = []
    for index, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
        gain = 1.0
        for depth in range(min(limit, max_total)):
            gain *= rate
            gains.append((gain, -depth, index))
    gains.sort(reverse=True)
    # Prompts in the step take their time with and without draft tokens.
    prompts = costs.step(num_tokens) - costs.step(num_decodes)
    expected, seconds = float(num_decodes), costs.step(num_decodes)
    best, best_count, count, proposals, bookkeeping = expected / seconds, 0, 0, 0.0, 0.0
    at_depth: dict[int, int] = {}
    for gain, depth, _ in gains[:max_total]:
        count += 1
        expected += gain
        bookkeeping += 0.0 if depth else costs.bookkeeping
        if with_proposals:
            others = at_depth.get(depth, 0)
            proposals += costs.proposal(others + 1) - (costs.proposal(others) if others else 0.0)
            at_depth[depth] = others + 1
        rate = expected / (costs.step(num_tokens + count) - prompts + proposals + bookkeeping)
        if rate > best:
            best, best_count = rate, count
    lengths = [0] * len(rates)
    for _, _, index in gains[:best_count]:
        lengths[index] += 1
    return lengths
