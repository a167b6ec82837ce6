"""N-gram lookup: proposes what followed the last few tokens of a sequence earlier in it (Saxena 2023)."""

from __future__ import annotations

from aiakq.runtime.config.speculation import SpeculationConfig


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
    """Where each n-gram of a sequence occurred last. A new token adds one entry for each of ``sizes``."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """See ``SequenceProposer``."""
        # The n-grams at the very end are added with the next token: they are what is looked up.
        self._index(token_ids)
        for size in self._sizes:
            if size < len(token_ids):
                end = self._ends.get(tuple(token_ids[-size:]), 0)
                if end:
                    return _continuation(token_ids, end, max_tokens)
        return []

    def finish(self, token_ids: list[int]) -> None:
        """See ``SequenceProposer``."""

    def _index(self, token_ids: list[int]) -> None:
        """Add the n-grams of new tokens but the last one."""
        for size in self._sizes:
            first = max(self._num_indexed + 1 - size, 0)  # where the first new n-gram begins
            new = token_ids[first:-1]
            ngrams = zip(*(new[at:] for at in range(size)), strict=False)
            self._ends.update(zip(ngrams, range(first + size, len(token_ids)), strict=False))
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


def _continuation(token_ids: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on. Beyond the last one, the text is taken to repeat itself."""
    found = token_ids[start : start + count]
    period = len(token_ids) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
