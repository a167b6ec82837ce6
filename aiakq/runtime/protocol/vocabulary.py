"""Vocabulary: the bytes of every token, which is all that grammars need of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


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
