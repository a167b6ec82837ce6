"""Vocabulary: the bytes of every token, which is all that grammars need of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from aiakq.runtime.text.spelling import CompiledModel
from aiakq.runtime.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens by id.

    tokens       UTF-8 bytes of each; empty for tokens that are never generated.
    special_ids  special tokens, which are not text.
    eos_ids      end-of-sequence tokens.
    added_ids    added tokens, which are matched before the text is split.
    model        the model of a fast tokenizer (merges or scores), without normalizer and pre-tokenizer, as
                 tokenizer.json; may be empty.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int] = []
    added_ids: list[int] = []
    model: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The vocabulary of ``tokenizer``, which has text."""
        size = tokenizer.vocab_size
        return cls(
            [tokenizer.token_bytes(id) for id in range(size)],
            sorted(tokenizer.special_ids),
            added_ids=sorted(tokenizer.added_ids),
            model=tokenizer.model_json(),
        )

    def resized(self, size: int, eos_ids: Sequence[int]) -> Vocabulary:
        """Resized to logits of ``size`` tokens. Without ``eos_ids``, an end token is added that has no logit."""
        tokens = [*self.tokens[:size], *[b""] * (size - len(self.tokens))]
        special = {id for id in self.special_ids if id < size}
        ends = [id for id in eos_ids if id < size]
        if not ends:
            tokens.append(b"<end>")
            ends = [size]
        added = [id for id in self.added_ids if id < size]
        return Vocabulary(tokens, sorted(special | set(ends)), ends, added, self.model)

    def text_only_at_end(self, eos_ids: Iterable[int]) -> int | None:
        """The first of ``eos_ids`` that is a text of which no other tokens can consist: no grammar can demand it.

        White space does not count, which the formats of structured output do not demand.
        """
        ends = {id for id in eos_ids if id < len(self.tokens)}
        ordinary = ends - set(self.special_ids)
        needed = {id: {bytes([byte]) for byte in self.tokens[id] if byte not in b" \t\r\n"} for id in ordinary}
        spelled = (
            {text for id, text in enumerate(self.tokens) if len(text) == 1 and id not in ends} if needed else set()
        )
        return next((id for id, parts in sorted(needed.items()) if not parts <= spelled), None)

    def end_failure(self, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> str:
        """Return why no grammar can be enforced with the end-of-sequence tokens of a model, or "".

        tokenizer  that of the vocabulary.
        """
        id = self.text_only_at_end(eos_ids)
        if id is None:
            return ""
        shown = f"{tokenizer.raw_tokens([id])[0]!r:.40}"
        return f"the end-of-sequence token {id} is the text {shown}, which no other tokens can spell"

    def splitter(self) -> Callable[[str], list[int]]:
        """A function that approximates the tokenizer: text to token ids, none if ``model`` is empty."""
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
