"""Texts are cut where their first tokens end."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiakq.runtime.text.cut_text import cut_text
from aiakq.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_a_text_is_cut_at_its_first_tokens(mode: str, example_model: Path) -> None:
    tokenizer = Tokenizer.load(example_model, mode=mode)
    text = "The quick brown fox, na\u00efve \U0001f98a\U0001f98a \u4f60\u597d jumps"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for limit in range(len(ids) + 2):
        cut = cut_text(tokenizer, text, limit)
        assert text.startswith(cut) and len(tokenizer.encode(cut, add_special_tokens=False)) <= limit
        assert cut == tokenizer.decode(ids[:limit]).rstrip("\ufffd")
