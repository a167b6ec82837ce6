"""Incremental detokenizer: never emits an incomplete UTF-8 character."""

from __future__ import annotations

from aiakq.runtime.text.tokenizer import Tokenizer

#: Number of prompt tokens to decode before the first generated token, as some tokenizers drop a leading space.
CONTEXT_TOKENS = 6


class Detokenizer:
    """Incremental detokenizer of one sequence. The concatenated pieces equal the text of all tokens decoded together.

    kept_special_tokens  special tokens that are kept in the text even with ``skip_special_tokens``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        skip_special_tokens: bool,
        spaces: bool = True,
        kept_special_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and not kept_special_tokens
        self._left_out: frozenset[int] = frozenset()
        if skip_special_tokens and kept_special_tokens:
            self._left_out = tokenizer.special_ids - kept_special_tokens
        self._spaces = spaces
        self._ids = [token for token in prompt_token_ids[-CONTEXT_TOKENS:] if token not in self._left_out]
        # Text up to _shown was returned; decoding starts at _from, so that a piece is decoded in its context.
        self._from = 0
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """Add a token and return the new text; empty while a UTF-8 character is incomplete."""
        if token in self._left_out:
            return ""
        self._ids.append(token)
        before = self._decode(self._from, self._shown)
        text = self._decode(self._from, len(self._ids))
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """Return the remaining text at the end, with U+FFFD for incomplete characters."""
        before = self._decode(self._from, self._shown)
        text = self._decode(self._from, len(self._ids))
        self._from, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip, spaces=self._spaces)
