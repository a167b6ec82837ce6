"""Incremental detokenizer: never emits an incomplete UTF-8 character."""

from __future__ import annotations

from aiakq.runtime.text.tokenizer import Tokenizer

#: Prompt tokens decoded in front of the first generated one: some tokenizers drop a leading space at the start.
CONTEXT_TOKENS = 6


class Detokenizer:
    """Incremental text of one sequence. The pieces joined are the text of all tokens decoded at once.

    kept_special_tokens  those that are part of the text even with ``skip_special_tokens``.
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
        # Text up to _shown is out; decoding starts at _from, so that a piece is decoded in its neighbourhood.
        self._from = 0
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is not whole."""
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
        """What is left at the end: bytes that never became a character come out as U+FFFD."""
        before = self._decode(self._from, self._shown)
        text = self._decode(self._from, len(self._ids))
        self._from, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip, spaces=self._spaces)
