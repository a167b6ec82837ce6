"""Cut a text after a number of tokens."""

from __future__ import annotations

import bisect

from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.tokenizer import Tokenizer


def cut_text(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """Return the beginning of ``text`` that its first ``max_tokens`` tokens are, not counting special tokens.

    A character that is spread over several tokens is not cut in two. Lone surrogates become U+FFFD.
    """
    text = well_formed(text)
    while text:
        spans = tokenizer.spans(text)
        if spans is None:
            return _cut_decoded(tokenizer, text, max_tokens)
        if len(spans) <= max_tokens:
            break
        end = min(spans[max_tokens - 1][1], spans[max_tokens][0]) if max_tokens else 0
        # The beginning is tokenized again: it may be split in another way than in the whole text.
        text = text[: min(end, len(text) - 1)]
    return text


def _cut_decoded(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """As ``cut_text``, for a tokenizer that does not tell where its tokens are."""

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= max_tokens:
        return text
    cut = tokenizer.decode(ids[:max_tokens], skip_special_tokens=False).rstrip("\ufffd")
    if text.startswith(cut) and num_tokens(cut) <= max_tokens:
        return cut
    lengths = range(1, len(text) + 1)
    return text[: bisect.bisect_right(lengths, max_tokens, key=lambda length: num_tokens(text[:length]))]
