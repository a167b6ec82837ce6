"""N-gram lookup: proposes what followed the last few tokens of a sequence earlier in it (Saxena 2023)."""

from __future__ import annotations

from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.token_text import TokenText

#: Tokens at the end of a sequence that are searched instead of indexed, at least; more than the longest n-gram has.
SEARCHED_TOKENS = 2048


class NgramProposer:
    """Looks up n-grams of ``sizes`` tokens, in this order."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes

    @staticmethod
    def from_config(config: SpeculationConfig) -> NgramProposer:
        """See ``Proposer``."""
        return NgramProposer(range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1))

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> NgramTable:
        """See ``Proposer``."""
        return NgramTable(self._sizes)


class NgramTable:
    """Where each n-gram of a sequence occurred last.

    The last tokens are searched, which is faster than to index them as long as they are few. Those before them are
    indexed in blocks, with one entry for each of ``sizes`` per token, so that a proposal takes the same time at every
    length.
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._text = TokenText()
        self._ends: dict[tuple[int, ...], int] = {}  # of the n-grams that end within the first ``_num_indexed`` tokens
        self._num_indexed = 0

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """See ``SequenceProposer``."""
        self._text.extend(token_ids)
        if len(self._text) > 2 * SEARCHED_TOKENS:
            self._index(token_ids, len(token_ids) - SEARCHED_TOKENS)
        for size in self._sizes:
            end = self._text.find_last(size)
            if end is None and self._ends and size < len(token_ids):
                end = self._ends.get(tuple(token_ids[-size:]))
            if end is not None:
                return _continuation(token_ids, end, max_tokens)
        return []

    def finish(self, token_ids: list[int]) -> None:
        """See ``SequenceProposer``."""

    def _index(self, token_ids: list[int], count: int) -> None:
        """Index the first ``count`` tokens, and search only those that n-grams behind them have."""
        for size in self._sizes:
            first = max(self._num_indexed + 1 - size, 0)  # where the first new n-gram begins
            new = token_ids[first:count]
            ngrams = zip(*(new[at:] for at in range(size)), strict=False)
            self._ends.update(zip(ngrams, range(first + size, count + 1), strict=False))
        self._num_indexed = count
        self._text.drop(max(0, count + 1 - self._sizes[0] - self._text.start))


def _continuation(token_ids: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on. Beyond the last one, the text is taken to repeat itself."""
    found = token_ids[start : start + count]
    period = len(token_ids) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
