"""Suffix decoding: continues the longest suffix of a sequence that occurred before, in it or in earlier outputs.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). What followed the suffix is counted token by token, and the
most frequent continuation is proposed while it is likely enough; the longer the matched suffix, the more tokens. Where
the paper walks a suffix tree, ``SuffixIndex`` looks up n-grams of a few sizes and compares the texts before them: a new
token then takes a constant number of entries, and a text is removed in the time that it took to add.

Earlier outputs are shared within a scope (``Proposer.new_sequence``) only: another client's text would show in how fast
an answer comes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from aiakq.runtime.config.speculation import SpeculationConfig

#: Sizes of the n-grams that are looked up, the longest first.
SIZES = (8, 3, 1)
#: Occurrences of an n-gram that are kept, the latest.
MAX_OCCURRENCES = 64
#: Tokens of earlier outputs, over all scopes; each takes about half a kilobyte.
MAX_CACHED_TOKENS = 2**18

#: Bits of an occurrence that hold where it ends.
_END_BITS = 32


class Continuation(NamedTuple):
    """Draft tokens, and how many of them are expected to be accepted."""

    tokens: list[int]
    score: float


class SuffixIndex:
    """Texts, and where their n-grams occur.

    max_depth        of the suffix tree that the index stands for: tokens of a match and of its continuation together.
    max_spec_factor  draft tokens per matched token.
    min_token_prob   probability of the continuation, from the counts, down to which tokens are proposed.
    """

    def __init__(self, max_depth: int, max_spec_factor: float, min_token_prob: float) -> None:
        self._max_depth, self._factor, self._min_prob = max_depth, max_spec_factor, min_token_prob
        #: Draft tokens for which matches of that many tokens per factor are still within the depth.
        self._max_tokens = int(max_depth * max_spec_factor / (1 + max_spec_factor))
        self._texts: dict[int, list[int]] = {}
        # Hash of an n-gram -> its occurrences: one, or a list with the latest last.
        self._occurrences: dict[int, int | list[int]] = {}

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._texts)

    def __contains__(self, number: int) -> bool:
        """Whether there is a text ``number``."""
        return number in self._texts

    def append(self, number: int, tokens: list[int]) -> None:
        """Append ``tokens`` to text ``number``, a new one if there is none."""
        text = self._texts.setdefault(number, [])
        known = len(text)
        text += tokens
        base = number << _END_BITS
        # An n-gram is added when it is known what follows.
        for size in SIZES:
            first = max(known - size, 0)
            new = text[first:-1]
            ngrams = zip(*(new[at:] for at in range(size)), strict=False)
            for place, key in enumerate(map(hash, ngrams), base | (first + size)):
                if self._occurrences.setdefault(key, place) is not place:
                    self._add(key, place)

    def remove(self, number: int) -> int:
        """Remove text ``number``; returns how many tokens it had."""
        text = self._texts.pop(number)
        base = number << _END_BITS
        for end in range(1, len(text)):
            for key in _keys(text, end):
                self._discard(key, base | end)
        return len(text)

    def continuation(self, token_ids: list[int], max_tokens: int, own: int | None = None) -> Continuation:
        """At most ``max_tokens`` tokens to follow ``token_ids``.

        own  the text that is ``token_ids``, if one is: beyond its end it is taken to repeat itself.
        """
        matches = self._matches(token_ids)
        if not matches:
            return Continuation([], 0.0)
        longest = max(length for length, _, _ in matches)
        count = min(max_tokens, int(self._factor * longest), self._max_tokens)
        required = min(longest, self._max_depth - count)
        # Of equally frequent tokens, the one that followed last is proposed.
        open_ends = [(number, end) for length, number, end in reversed(matches) if length >= required]
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < count:
            following = [
                (self._token(number, end + len(tokens), own, tokens), number, end) for number, end in open_ends
            ]
            counts: dict[int, int] = {}
            for token, _, _ in following:
                if token is not None:
                    counts[token] = counts.get(token, 0) + 1
            if not counts:
                break
            best = max(counts, key=counts.__getitem__)
            probability *= counts[best] / len(following)
            if probability < self._min_prob:
                break
            tokens.append(best)
            score += probability
            open_ends = [(number, end) for token, number, end in following if token == best]
        return Continuation(tokens, score)

    def _matches(self, token_ids: list[int]) -> list[tuple[int, int, int]]:
        """(length, text, end) where the last ``length`` tokens occurred: of the longest n-gram that did, the latest
        occurrences.
        """
        for size in SIZES:
            if size > min(len(token_ids), self._max_depth):
                continue
            found = self._occurrences.get(hash(tuple(token_ids[-size:])))
            places = [] if found is None else [found] if isinstance(found, int) else found
            matches = []
            for place in places:
                number, end = place >> _END_BITS, place & (1 << _END_BITS) - 1
                length = self._common_suffix(self._texts[number], end, token_ids)
                if length >= size:  # else another n-gram has the same hash
                    matches.append((length, number, end))
            if matches:
                return matches
        return []

    def _common_suffix(self, text: list[int], end: int, token_ids: list[int]) -> int:
        """Length, up to the depth, of the common suffix of ``text`` up to ``end`` and of ``token_ids``."""
        longest = min(end, len(token_ids), self._max_depth)
        length = 0
        while length < longest and text[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length

    def _token(self, number: int, at: int, own: int | None, tokens: list[int]) -> int | None:
        """Token ``at`` of text ``number``, which ``tokens`` follow if it is ``own``; None beyond its end."""
        text = self._texts[number]
        if at < len(text):
            return text[at]
        return tokens[at - len(text)] if number == own else None

    def _add(self, key: int, place: int) -> None:
        """Add an occurrence to earlier ones."""
        found = self._occurrences[key]
        if isinstance(found, int):
            self._occurrences[key] = [found, place]
        else:
            found.append(place)
            if len(found) > MAX_OCCURRENCES:
                del found[0]

    def _discard(self, key: int, place: int) -> None:
        found = self._occurrences.get(key)
        if found == place:
            del self._occurrences[key]
        elif isinstance(found, list) and place in found:
            found.remove(place)
            if len(found) == 1:
                self._occurrences[key] = found[0]


def _keys(text: list[int], end: int) -> list[int]:
    """The hashes of the n-grams that end at ``end``."""
    return [hash(tuple(text[end - size : end])) for size in SIZES if size <= end]


class SuffixProposer:
    """Suffix decoding with the outputs of the last ``max_requests`` sequences, of ``MAX_CACHED_TOKENS`` in all.

    settings  of the indices.
    """

    def __init__(self, settings: tuple[int, float, float], max_requests: int) -> None:
        self._settings, self._max_requests = settings, max_requests
        self._numbers = itertools.count()
        self._indices: dict[bytes, SuffixIndex] = {}
        self._scopes: dict[int, bytes] = {}  # of the cached outputs, the oldest first
        self._num_tokens = 0

    @staticmethod
    def from_config(config: SpeculationConfig) -> SuffixProposer:
        """See ``Proposer``."""
        settings = (
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        return SuffixProposer(settings, config.suffix_decoding_max_cached_requests)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of earlier outputs, over all scopes."""
        return self._num_tokens

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> SuffixDrafts:
        """See ``Proposer``."""
        number = next(self._numbers)
        if self._max_requests:
            self._scopes[number] = scope
        return SuffixDrafts(self, SuffixIndex(*self._settings), scope, number, num_prompt_tokens)

    def append(self, number: int, tokens: list[int]) -> None:
        """Append ``tokens`` to the output ``number``, unless it was evicted."""
        scope = self._scopes.get(number)
        if scope is None or not tokens:
            return
        if scope not in self._indices:
            self._indices[scope] = SuffixIndex(*self._settings)
        self._indices[scope].append(number, tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_CACHED_TOKENS or len(self._scopes) > self._max_requests:
            self._evict(next(iter(self._scopes)))

    def continuation(self, scope: bytes, token_ids: list[int], max_tokens: int) -> Continuation:
        """See ``SuffixIndex``; among the outputs of ``scope``."""
        index = self._indices.get(scope)
        return Continuation([], 0.0) if index is None else index.continuation(token_ids, max_tokens)

    def _evict(self, number: int) -> None:
        scope = self._scopes.pop(number)
        index = self._indices.get(scope)
        if index is None or number not in index:
            return
        self._num_tokens -= index.remove(number)
        if not len(index):
            del self._indices[scope]


class SuffixDrafts:
    """The draft tokens of one sequence, from its own tokens or from the outputs of its scope."""

    def __init__(
        self, proposer: SuffixProposer, index: SuffixIndex, scope: bytes, number: int, num_prompt_tokens: int
    ) -> None:
        self._proposer, self._index, self._scope, self._number = proposer, index, scope, number
        self._num_indexed = 0
        self._num_published = num_prompt_tokens

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """See ``SequenceProposer``."""
        self._index.append(0, token_ids[self._num_indexed :])
        self._num_indexed = len(token_ids)
        self._publish(token_ids)
        own = self._index.continuation(token_ids, max_tokens, own=0)
        shared = self._proposer.continuation(self._scope, token_ids, max_tokens)
        return own.tokens if own.score >= shared.score else shared.tokens

    def finish(self, token_ids: list[int]) -> None:
        """See ``SequenceProposer``."""
        self._publish(token_ids)

    def _publish(self, token_ids: list[int]) -> None:
        """Add the tokens that were generated since to the outputs of the scope."""
        self._proposer.append(self._number, token_ids[self._num_published :])
        self._num_published = max(self._num_published, len(token_ids))
