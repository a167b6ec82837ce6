"""The simulated model: hashes in place of layers, so that a token depends on everything that was read for it.

The entry of a position, in place of its key and value, is a hash of the previous entry, the token and the position. The
next token is a hash of all entries that were read through the page table. An entry that is lost, stale, of another
sequence or at a wrong position therefore changes the output, while ``ReferenceRequest`` computes the right output from
the tokens alone, without pages.
"""

from __future__ import annotations

import math

from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import TokenLogprobs

VOCAB = 2048
#: Tokens 0 .. NUM_STOP_TOKENS - 1 are generated often: they are the stop tokens of requests.
NUM_STOP_TOKENS = 8
#: The entry of a position that was cleared or never written.
EMPTY = 0
#: The entry of a position that is not finite.
NAN_ENTRY = 1
#: The entry before position 0.
FIRST_ENTRY = 7919
_MASK = 0xFFFFFFFF


def next_entry(previous: int, token: int, position: int) -> int:
    """Return the entry of ``position``."""
    return NAN_ENTRY if previous == NAN_ENTRY else hash((previous, token, position))


def needs_all_candidates(entries: list[int]) -> bool:
    """Return whether the sampler's candidates do not suffice for the token after ``entries``."""
    return hash((tuple(entries), 104729)) % 50 == 0


def next_token(entries: list[int], spec: RequestSpec, num_outputs: int) -> tuple[int, float]:
    """Return the token after ``entries`` and a number in place of its log-probability."""
    value = hash((tuple(entries), spec.seed))
    token = value % VOCAB
    if value & 0xF00000 == 0:
        token %= NUM_STOP_TOKENS
    stop_tokens = {*(spec.sampling.stop_token_ids or ()), *spec.eos_token_ids}
    if num_outputs < spec.sampling.min_tokens and token in stop_tokens:
        token = NUM_STOP_TOKENS + token
    return token, -float(value & _MASK)


def prompt_logprob(entry: int, token: int) -> TokenLogprobs:
    """Return the log-probability of a prompt's token after a position with ``entry``."""
    return TokenLogprobs([token], [math.nan if entry == NAN_ENTRY else -float(entry & _MASK)], 1)


class ReferenceRequest:
    """One request, computed without a batch and without pages."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.entries: list[int] = []
        self.num_outputs = 0
        for token in spec.prompt_token_ids:
            self._append(token)

    def next(self) -> tuple[int, float, str | None, int | None]:
        """Return the next token, its log-probability, and the finish_reason and stop_reason after it."""
        spec = self.spec
        token, logprob = next_token(self.entries, spec, self.num_outputs)
        self._append(token)
        self.num_outputs += 1
        if self.num_outputs >= spec.sampling.min_tokens:
            if token in spec.eos_token_ids:
                return token, logprob, "stop", None
            if token in (spec.sampling.stop_token_ids or ()):
                return token, logprob, "stop", token
        return token, logprob, "length" if self.num_outputs >= spec.max_tokens else None, None

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        prompt = self.spec.prompt_token_ids
        return [None, *(prompt_logprob(self.entries[at - 1], prompt[at]) for at in range(1, len(prompt)))]

    def _append(self, token: int) -> None:
        previous = self.entries[-1] if self.entries else FIRST_ENTRY
        self.entries.append(next_entry(previous, token, len(self.entries)))
