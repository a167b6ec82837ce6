"""The vocabulary of a tokenizer, and a tokenizer made of a vocabulary alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.text.spelling import CompiledModel
from aiakq.runtime.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of ``tokenizer``, which has text."""
    return Vocabulary(
        [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)],
        sorted(tokenizer.special_ids),
        added_ids=sorted(tokenizer.added_ids),
        model=tokenizer.model_json(),
    )


def end_failure(vocabulary: Vocabulary, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> str:
    """Return why no grammar can be enforced with the end-of-sequence tokens of a model, or "".

    tokenizer  that of the vocabulary.
    """
    id = vocabulary.text_only_at_end(eos_ids)
    if id is None:
        return ""
    shown = f"{tokenizer.raw_tokens([id])[0]!r:.40}"
    return f"the end-of-sequence token {id} is the text {shown}, which no other tokens can spell"


def splitter(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Return a function that approximates the tokenizer: text to token ids, none if the ``model`` is empty."""
    if not vocabulary.model:
        return lambda text: []
    tokenizer, tokens = CompiledModel(vocabulary.model), vocabulary.tokens
    added = {tokens[id].decode(errors="replace"): id for id in vocabulary.added_ids if tokens[id]}
    if not added:
        return tokenizer.split
    longest_first = sorted(map(re.escape, added), key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(longest_first)})")

    def split(text: str) -> list[int]:
        parts = filter(None, pattern.split(text))
        return [id for part in parts for id in ([added[part]] if part in added else tokenizer.split(part))]

    return split
