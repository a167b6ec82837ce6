"""Incremental text: pieces that join to the whole, and never half a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from aiakq.runtime.text.detokenizer import CONTEXT_TOKENS, Detokenizer
from aiakq.runtime.text.tokenizer import Tokenizer

MIXED = "naïve café — 你好, 🙂🙃 end"


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.fixture(scope="module")
def trained(example_model: Path) -> Tokenizer:
    return Tokenizer.load(example_model)


@pytest.fixture(scope="module")
def bytewise(byte_tokenizer: Any) -> Tokenizer:
    return Tokenizer(byte_tokenizer)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Words that begin with a space, and bytes for what is no word, as Llama 2 has them: a space at the start of a text
    is dropped.
    """
    words = ["<unk>", "▁It", "▁was", "▁the", "▁sea", "s"]
    vocab = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(vocab)}, merges=[]))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.hf.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize("prompt", ["", "It was", "你"])
def test_text_pieces_join_to_the_whole(trained: Tokenizer, prompt: str) -> None:
    found = pieces(trained, trained.encode(prompt), trained.encode(MIXED))
    assert "".join(found) == MIXED
    assert not any("\ufffd" in piece for piece in found)


@given(st.text(max_size=40))
def test_any_text_comes_out_as_it_is(bytewise: Tokenizer, text: str) -> None:
    assert "".join(pieces(bytewise, [70, 71], bytewise.encode(text))) == text


@given(st.lists(st.integers(3, 258), max_size=30))
def test_any_bytes_come_out_as_when_they_are_decoded_at_once(bytewise: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(bytewise, [], ids)) == bytewise.decode(ids)


@pytest.mark.parametrize("character", ["é", "你", "🙂"])
def test_a_character_appears_with_its_last_byte(bytewise: Tokenizer, character: str) -> None:
    ids = bytewise.encode(character)
    assert len(ids) == len(character.encode())
    assert pieces(bytewise, bytewise.encode("It was"), ids) == [""] * (len(ids) - 1) + [character, ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end(bytewise: Tokenizer) -> None:
    assert pieces(bytewise, [], bytewise.encode("a🙂")[:3]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_none_come_out_with_the_next_character(bytewise: Tokenizer) -> None:
    broken = [*bytewise.encode("你")[:2], *bytewise.encode("ab")]
    assert pieces(bytewise, [], broken) == ["", "", "\ufffda", "b", ""]


def test_a_space_before_the_first_word_is_kept_after_a_prompt(sentencepiece: Tokenizer) -> None:
    it, was, the, sea, plural = (
        sentencepiece.hf.convert_tokens_to_ids(t) for t in ["▁It", "▁was", "▁the", "▁sea", "s"]
    )
    assert sentencepiece.decode([the, sea]) == "the sea"
    assert pieces(sentencepiece, [it, was], [the, sea, plural]) == [" the", " sea", "s", ""]
    assert pieces(sentencepiece, [], [the, sea, plural]) == ["the", " sea", "s", ""]
    far = [it, *[was] * (2 * CONTEXT_TOKENS)]
    assert pieces(sentencepiece, far, [the])[0] == " the"


def test_bytes_of_a_character_among_words(sentencepiece: Tokenizer) -> None:
    words = [sentencepiece.hf.convert_tokens_to_ids(token) for token in ("▁the", "▁sea")]
    ids = [words[0], *byte_ids(sentencepiece, "🙂é".encode()), words[1]]
    assert pieces(sentencepiece, words, ids) == [" the", "", "", "", "🙂", "", "é", " sea", ""]


def test_special_tokens_are_skipped_or_shown(bytewise: Tokenizer) -> None:
    a, b = bytewise.encode("ab")
    end = bytewise.hf.eos_token_id
    assert pieces(bytewise, [], [a, end, b, end]) == ["a", "", "b", "", ""]
    assert pieces(bytewise, [], [a, end, b, end], skip_special_tokens=False) == ["a", "</s>", "b", "</s>", ""]


@pytest.mark.parametrize("name", ["trained", "bytewise"])
def test_the_bytes_of_tokens_join_to_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == MIXED.encode()
    partial = [id for id in ids if "\ufffd" in tokenizer.token_text(id)]
    assert partial and all(tokenizer.token_bytes(id) != "\ufffd".encode() for id in partial)
    assert all(tokenizer.token_text(id).encode() == tokenizer.token_bytes(id) for id in ids if id not in partial)


def test_the_bytes_of_sentencepiece_tokens_keep_the_space(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.hf.convert_tokens_to_ids("▁sea"), *byte_ids(sentencepiece, "🙂\n".encode())]
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " sea🙂\n".encode()
    assert [sentencepiece.token_text(id) for id in (ids[0], ids[1], ids[-1])] == [" sea", "\ufffd", "\n"]


def test_special_tokens_have_bytes(bytewise: Tokenizer) -> None:
    end = bytewise.hf.eos_token_id
    assert bytewise.token_bytes(end) == b"</s>" and end in bytewise.special_ids
    assert bytewise.encode("a")[0] not in bytewise.special_ids


def test_tokenizers_in_python_give_what_they_decode() -> None:
    class InPython:
        is_fast = False

        def decode(self, ids: list[int], **options: Any) -> str:
            return "é" * len(ids)

    assert Tokenizer(InPython()).token_bytes(3) == "é".encode()
