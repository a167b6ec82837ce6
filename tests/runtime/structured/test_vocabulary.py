"""Vocabularies of tokenizers of every kind, as grammars need them."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.vocabulary import splitter, vocabulary_of
from aiakq.runtime.text.tokenizer import Tokenizer

TEXTS = ['{"name": "x", "ages": [1, 2]}', "The sea was calm, and nobody spoke.", "naïve café — 你好 🙂"]


def test_the_bytes_of_a_byte_level_vocabulary(example_model):
    tokenizer = Tokenizer.load(example_model)
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary.tokens) == tokenizer.vocab_size == len(tokenizer.hf)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.tokens[id] for id in ids) == text.encode()
    assert {vocabulary.tokens[id] for id in vocabulary.special_ids} >= {b"<|im_end|>"}


def test_texts_are_split_as_the_tokenizer_does_it(example_model):
    tokenizer = Tokenizer.load(example_model)
    split = splitter(vocabulary_of(tokenizer))
    for text in TEXTS:
        ids = split(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert split("<|im_end|>") != tokenizer.encode("<|im_end|>"), "special tokens are no text"


def test_added_tokens_are_found_first(example_model):
    tokenizer = Tokenizer.load(example_model)
    tokenizer.hf.add_tokens(["<tool_call>", "<tool_call>\n"])
    split = splitter(vocabulary_of(tokenizer))
    for text in ("a<tool_call>b</tool_call>", "<tool_call>\n<tool_call>", "x"):
        assert split(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_in_python_has_a_vocabulary_too(example_model):
    compiled, slow = (Tokenizer.load(example_model, mode=mode) for mode in ("auto", "slow"))
    own = vocabulary_of(slow)
    assert own.tokens == vocabulary_of(compiled).tokens and own.model == ""
    assert splitter(own)("abc") == []
    matcher = GrammarCompiler(own.resized(len(own.tokens), [2])).matcher(Grammar("regex", "abc"))
    for token in compiled.encode("abc", add_special_tokens=False):
        matcher.advance(token)
    assert matcher.is_finished


def test_sentencepiece_spells_spaces_and_bytes():
    words = ["<unk>", "▁the", "▁sea", "s", "▁"]
    vocab = {token: id for id, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = vocabulary_of(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")))
    assert vocabulary.tokens[1:6] == [b" the", b" sea", b"s", b" ", b"\0"]
    assert vocabulary.special_ids == [0]
    matcher = GrammarCompiler(vocabulary.resized(300, [0])).matcher(Grammar("regex", "(é| the seas)"))
    for token in (1, 2, 3):
        matcher.advance(token)
    assert matcher.failure is None and matcher.is_finished


def test_end_tokens_beyond_the_logits_are_left_out():
    vocabulary = Vocabulary([b"a", b"b", b"c"], special_ids=[2, 7])
    assert vocabulary.resized(3, [2, 99]).eos_ids == [2]
    assert vocabulary.resized(3, [99]).eos_ids == [3], "an end token without a logit"


def test_an_ordinary_token_that_ends_texts_is_not_forced_as_text(example_model):
    vocabulary = vocabulary_of(Tokenizer.load(example_model))
    grammar = Grammar("choice", '["the weather"]')
    for text in (b"the", b" weather"):
        end = vocabulary.tokens.index(text)
        matcher = GrammarCompiler(vocabulary.resized(len(vocabulary.tokens), [end])).matcher(grammar)
        forced = matcher.forced_tokens(20)
        assert end not in forced and b"".join(vocabulary.tokens[id] for id in forced) == b"the weather"
        for token in forced:
            matcher.advance(token)
        assert matcher.failure is None


def test_an_ordinary_token_that_ends_texts_may_be_the_only_spelling_of_one():
    tokens = [*(bytes([byte]) for byte in range(256)), b"the", b"\n\n", b"<end>", "é".encode()]
    vocabulary = Vocabulary(tokens, [258])
    assert vocabulary.text_only_at_end([ord("}")]) == ord("}")
    for ends in ([256], [257], [258], [259], [ord("\n")], [1000], []):
        assert vocabulary.text_only_at_end(ends) is None, "another spelling, a special token, or white space"
    assert Vocabulary(["é".encode(), b"e"], []).text_only_at_end([0]) == 0
