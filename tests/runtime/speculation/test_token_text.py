"""A sequence as a string: where its last tokens occurred, up to any vocabulary size."""

from __future__ import annotations

from aiakq.runtime.speculation.token_text import TokenText


def text_of(*tokens: int) -> TokenText:
    text = TokenText()
    text.extend(list(tokens))
    return text


def test_the_last_occurrence_before_the_end_is_found():
    text = text_of(1, 2, 3, 1, 2, 4, 1, 2)
    assert [text.find_last(size) for size in (1, 2, 3, 9)] == [5, 5, None, None]
    assert text.find_last(2, before=5) == 2 and text.find_last(2, before=2) is None


def test_what_was_dropped_is_not_found_and_places_stay():
    text = text_of(7, 8, 1, 7, 8, 2, 7, 8)
    text.drop(2)
    assert text.start == 2 and len(text) == 6
    assert text.find_last(2) == 5 and text.find_last(2, before=5) is None
    text.extend([7, 8, 1, 7, 8, 2, 7, 8, 1])
    assert text.find_last(1) == 3 and text.find_last(3) is None


def test_tokens_of_surrogates_and_invalid_characters_are_distinguished():
    tokens = [0xD800, 0xDC00, 0x10FFFF, 2_000_000, 2_000_001]
    text = text_of(*tokens, 5, 0xD800, 0xDC00, 0x10FFFF, 2_000_000)
    assert text.find_last(4) == 4 and text.find_last(5) is None
