"""Vocabulary: the bytes of every token, all that a grammar needs to know of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from aiakq.runtime.text.spelling import CompiledModel
from aiakq.runtime.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens by id.

    tokens       what each adds to a text, in UTF-8; empty for those that are never generated.
    special_ids  tokens that are no text.
    eos_ids      tokens that end a text.
    added_ids    tokens that are found in a text first.
    model        the merges or scores of a compiled tokenizer, without what splits and changes texts before, as
                 tokenizer.json; may be empty.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int] = []
    added_ids: list[int] = []
    model: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The tokens of ``tokenizer``, which has text."""
        size = tokenizer.vocab_size
        return cls(
            [tokenizer.token_bytes(id) for id in range(size)],
            sorted(tokenizer.special_ids),
            added_ids=sorted(tokenizer.added_ids),
            model=tokenizer.model_json(),
        )

    def resized(self, size: int, eos_ids: Sequence[int]) -> Vocabulary:
        """For logits of ``size`` tokens. Without ``eos_ids`` one token more is made up, which no logits have."""
        tokens = [*self.tokens[:size], *[b""] * (size - len(self.tokens))]
        special = {id for id in self.special_ids if id < size}
        ends = list(eos_ids)
        if not ends:
            tokens.append(b"<end>")
            ends = [size]
        added = [id for id in self.added_ids if id < size]
        return Vocabulary(tokens, sorted(special | set(ends)), ends, added, self.model)

    def splitter(self) -> Callable[[str], list[int]]:
        """Splits a text into tokens as the tokenizer would, or nearly so; into none if it is not known how."""
        if not self.model:
            return lambda text: []
        tokenizer = CompiledModel(self.model)
        added = {self.tokens[id].decode(errors="replace"): id for id in self.added_ids if self.tokens[id]}
        if not added:
            return tokenizer.split
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        pattern = re.compile(f"({'|'.join(longest_first)})")

        def split(text: str) -> list[int]:
            parts = filter(None, pattern.split(text))
            return [id for part in parts for id in ([added[part]] if part in added else tokenizer.split(part))]

        return split
