"""Suffix decoding: continues the longest suffix of a sequence that occurred before, in it or in earlier outputs.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). What followed the suffix is counted token by token, and the
most frequent continuation is proposed while it is likely enough; the longer the matched suffix, the more tokens. Where
the paper walks a suffix tree, the last tokens of the sequence are searched as a string. Everything else is in a
``SuffixIndex``, which looks up n-grams of a few sizes and compares the texts before them: a new token then takes a
constant number of entries, and a text is removed in the time that it took to add.

Earlier outputs are shared within a scope (``Proposer.new_sequence``) only: another client's text would show in how fast
an answer comes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.token_text import TokenText

#: Sizes of the n-grams that are looked up, the longest first.
SIZES = (8, 3, 1)
#: Occurrences of an n-gram that are kept, the latest.
MAX_OCCURRENCES = 64
#: Tokens of earlier outputs, over all scopes; each takes about half a kilobyte.
MAX_CACHED_TOKENS = 2**18

#: Tokens at the end of a sequence that are searched instead of indexed, at least.
SEARCHED_TOKENS = 2048
#: Tokens of an output that are added to those of its scope together, unless it has ended: adding takes time.
PUBLISHED_TOKENS = 16

#: Bits of an occurrence that hold where it ends.
_END_BITS = 32


class Continuation(NamedTuple):
    """Draft tokens, and how many of them are expected to be accepted."""

    tokens: list[int]
    score: float


_NOTHING = Continuation([], 0.0)


class SuffixSettings(NamedTuple):
    """Bounds of a proposal.

    max_depth        of the suffix tree in the paper: tokens of a match and of its continuation together.
    max_spec_factor  draft tokens per matched token.
    min_token_prob   probability of the continuation, from the counts, down to which tokens are proposed.
    """

    max_depth: int
    max_spec_factor: float
    min_token_prob: float

    def lengths(self, longest: int, max_tokens: int) -> tuple[int, int]:
        """The number of draft tokens where the longest match has ``longest`` tokens, and how many tokens of a match are
        enough to be counted: beyond the depth, longer ones are not told apart.
        """
        factor = self.max_spec_factor
        count = min(max_tokens, int(factor * longest), int(self.max_depth * factor / (1 + factor)))
        return count, min(longest, self.max_depth - count)

    def most_frequent(self, open_ends: list[tuple[list[int], int]], count: int, own: list[int]) -> Continuation:
        """At most ``count`` tokens that followed ``open_ends`` most often: texts and places in them, the latest first.

        own  the text that is continued: beyond its end it is taken to repeat itself.
        """
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < count:
            following = []
            counts: dict[int, int] = {}
            for text, end in open_ends:
                if end < len(text):
                    token = text[end]
                elif text is own:
                    token = tokens[end - len(text)]
                else:
                    continue
                following.append((token, text, end + 1))
                counts[token] = counts.get(token, 0) + 1
            if not counts:
                break
            # Of equally frequent tokens, the one that followed last.
            best = max(counts, key=counts.__getitem__)
            probability *= counts[best] / len(open_ends)
            if probability < self.min_token_prob:
                break
            tokens.append(best)
            score += probability
            open_ends = [(text, end) for token, text, end in following if token == best]
        return Continuation(tokens, score)


class SuffixIndex:
    """Texts, and where their n-grams occur."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
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

    def continuation(self, token_ids: list[int], max_tokens: int) -> Continuation:
        """At most ``max_tokens`` tokens to follow ``token_ids``."""
        matches = self.matches(token_ids)
        if not matches:
            return _NOTHING
        count, required = self._settings.lengths(max(length for length, _, _ in matches), max_tokens)
        ends = [(self._texts[number], end) for length, number, end in reversed(matches) if length >= required]
        return self._settings.most_frequent(ends, count, token_ids)

    def matches(self, token_ids: list[int]) -> list[tuple[int, int, int]]:
        """(length, text, end) where the last ``length`` tokens occurred: of the longest n-gram that did, the latest
        occurrences.
        """
        for size in SIZES:
            if size > min(len(token_ids), self._settings.max_depth):
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
        longest = min(end, len(token_ids), self._settings.max_depth)
        length = 0
        while length < longest and text[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length

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

    settings  of proposals.
    """

    def __init__(self, settings: SuffixSettings, max_requests: int) -> None:
        self.settings, self._max_requests = settings, max_requests
        self._numbers = itertools.count()
        self._indices: dict[bytes, SuffixIndex] = {}
        self._scopes: dict[int, bytes] = {}  # of the cached outputs, the oldest first
        self._num_tokens = 0

    @staticmethod
    def from_config(config: SpeculationConfig) -> SuffixProposer:
        """See ``Proposer``."""
        settings = SuffixSettings(
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
        return SuffixDrafts(self, scope, number, num_prompt_tokens)

    def append(self, number: int, tokens: list[int]) -> None:
        """Append ``tokens`` to the output ``number``, unless it was evicted."""
        scope = self._scopes.get(number)
        if scope is None or not tokens:
            return
        if scope not in self._indices:
            self._indices[scope] = SuffixIndex(self.settings)
        self._indices[scope].append(number, tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_CACHED_TOKENS or len(self._scopes) > self._max_requests:
            self._evict(next(iter(self._scopes)))

    def continuation(self, scope: bytes, token_ids: list[int], max_tokens: int) -> Continuation:
        """See ``SuffixIndex``; among the outputs of ``scope``."""
        index = self._indices.get(scope)
        return _NOTHING if index is None else index.continuation(token_ids, max_tokens)

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

    def __init__(self, proposer: SuffixProposer, scope: bytes, number: int, num_prompt_tokens: int) -> None:
        self._proposer, self._scope, self._number = proposer, scope, number
        self._settings = proposer.settings
        self._text = TokenText()
        self._older: SuffixIndex | None = None  # of the first ``_num_indexed`` tokens
        self._num_indexed = 0
        self._num_published = num_prompt_tokens

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """See ``SequenceProposer``."""
        self._text.extend(token_ids)
        if len(self._text) > 2 * SEARCHED_TOKENS:
            self._index(token_ids, len(token_ids) - SEARCHED_TOKENS)
        if len(token_ids) - self._num_published >= PUBLISHED_TOKENS:
            self._publish(token_ids)
        own = self._own(token_ids, max_tokens)
        shared = self._proposer.continuation(self._scope, token_ids, max_tokens)
        return own.tokens if own.score >= shared.score else shared.tokens

    def finish(self, token_ids: list[int]) -> None:
        """See ``SequenceProposer``."""
        self._publish(token_ids)

    def _own(self, token_ids: list[int], max_tokens: int) -> Continuation:
        """The continuation of the longest suffix that occurred in the sequence before."""
        older = [] if self._older is None else self._older.matches(token_ids)
        longest = max(self._longest_searched(token_ids), max((length for length, _, _ in older), default=0))
        if not longest:
            return _NOTHING
        count, required = self._settings.lengths(longest, max_tokens)
        ends: list[tuple[list[int], int]] = []
        end = self._text.find_last(required)
        while end is not None and end >= self._num_indexed and len(ends) < MAX_OCCURRENCES:
            ends.append((token_ids, end))
            end = self._text.find_last(required, end)
        ends += [(token_ids, end) for length, _, end in reversed(older) if length >= required]
        return self._settings.most_frequent(ends[:MAX_OCCURRENCES], count, token_ids)

    def _longest_searched(self, token_ids: list[int]) -> int:
        """The length, up to the depth, of the longest suffix that occurs before in the searched tokens."""
        longest, last = 0, len(token_ids) - 1
        while longest < self._settings.max_depth:
            # The last occurrence of a longer suffix does not come after that of a shorter one.
            end = self._text.find_last(longest + 1, last + 1)
            if end is None:
                break
            longest, last = longest + 1, end
        return longest

    def _index(self, token_ids: list[int], count: int) -> None:
        """Index the first ``count`` tokens, and search only those that matches behind them have."""
        if self._older is None:
            self._older = SuffixIndex(self._settings)
        self._older.append(0, token_ids[self._num_indexed : count])
        self._num_indexed = count
        self._text.drop(max(0, count - self._settings.max_depth - self._text.start))

    def _publish(self, token_ids: list[int]) -> None:
        """Add the tokens that were generated since to the outputs of the scope."""
        self._proposer.append(self._number, token_ids[self._num_published :])
        self._num_published = max(self._num_published, len(token_ids))
