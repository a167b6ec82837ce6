"""Texts and pairs of texts as an encoder reads them: with special tokens around them even if they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aiakq.errors import error
from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.tokenizer import Tokenizer


def encode_whole(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limit: int | None = None,
    cut_side: Literal["left", "right"] = "right",
    add_special_tokens: bool = True,
) -> tuple[list[int], int]:
    """Return the ids of one text, or of a pair of texts, and the index at which the second begins.

    The index is 0 without a second text, and for a tokenizer whose model does not tell them apart.

    limit     tokens to keep, special ones included; of a pair, the longer text is cut first, as sentence-transformers
              does.
    cut_side  which side of a text is cut.

    Raises ``no_tokenizer``, and ``value_out_of_range`` for a limit that leaves no room for a text.
    """
    hf = tokenizer.hf
    if hf is None:
        raise error("no_tokenizer")
    if limit is not None and add_special_tokens:
        added = hf.num_special_tokens_to_add(pair=len(texts) > 1)
        if limit <= added:
            allowed = f"more than the {added} special tokens around a text"
            raise error("value_out_of_range", param="truncate_prompt_tokens", value=limit, allowed=allowed)
    side, backend = getattr(hf, "truncation_side", "right"), getattr(hf, "_tokenizer", None)
    try:
        hf.truncation_side = cut_side
        encoded = hf(
            *map(well_formed, texts),
            add_special_tokens=add_special_tokens,
            truncation="do_not_truncate" if limit is None else "longest_first",
            max_length=limit,
            verbose=False,
        )
    finally:
        hf.truncation_side = side
        if backend is not None:
            backend.no_truncation()
    ids = list(encoded["input_ids"])
    kinds = encoded.get("token_type_ids") if len(texts) > 1 else None
    if not kinds or 1 not in kinds:
        return ids, 0
    second = kinds.index(1)
    if list(kinds) != [0] * second + [1] * (len(ids) - second):
        hint = "aiakq computes pairs whose second text, and all behind it, are of the second kind."
        raise error("unsupported", what="A tokenizer with other kinds of tokens in a pair (token_type_ids)", hint=hint)
    return ids, second
