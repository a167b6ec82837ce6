"""The keys of tokenizers in new files: ids stay the same, and what files do not hold is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AddedToken, PreTrainedTokenizerFast

from aiakq.convert.gguf.tokenizer import tokenizer_keys
from aiakq.errors import AiakqError
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.formats.gguf_model.pre_tokenizers import PRE_TOKENIZERS
from aiakq.formats.gguf_model.tokenizer import tokenizer_files
from aiakq.runtime.text.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str, **changes: Any) -> Tokenizer:
    vocab = {token: id for id, token in enumerate(["<s>", "</s>", *BYTES, "ab", "Ġa", "Ġab"])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a"), ("Ġ", "ab")]))
    content = json.loads(rust.to_str())
    known = PRE_TOKENIZERS[pre]
    content["pre_tokenizer"] = known.to_json()
    content["normalizer"] = {"type": known.normalizer} if known.normalizer else None
    content["model"]["ignore_merges"] = known.ignore_merges
    content.update(changes)
    rust = RustTokenizer.from_str(json.dumps(content))
    rust.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))


def sentencepiece(prefix: bool, merges: Any = None) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = merges or [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁a", "b")]
    vocab = {token: id for id, token in enumerate(pieces)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    rust.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, **names))


@pytest.mark.parametrize("name", ["gpt-2", "mpt", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "falcon", "bloom"])
def test_byte_level_tokenizers_get_the_name_of_how_they_split(name):
    keys, notes = tokenizer_keys(byte_level(name), 300)
    assert keys["tokenizer.ggml.pre"] == name and keys["tokenizer.ggml.model"] == "gpt2" and not notes
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.ggml.tokens"][299] == "[PAD299]" and keys["tokenizer.ggml.token_type"][299] == 5


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_of_sentencepiece_follow_the_merges(prefix):
    keys, notes = tokenizer_keys(sentencepiece(prefix), 265, end_ids=[2, 260])
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is prefix and not notes
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.eot_token_id"] == 260
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    files = tokenizer_files(Metadata({"general.architecture": "llama", **keys}, "x"))
    assert files["generation_config.json"]["eos_token_id"] == [2, 260]


def test_templates_are_kept():
    tokenizer = byte_level("gpt-2")
    tokenizer.hf.chat_template = {"default": "a", "tool_use": "b"}
    keys, _ = tokenizer_keys(tokenizer, 261)
    assert keys["tokenizer.chat_template"] == "a" and keys["tokenizer.chat_template.tool_use"] == "b"


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (lambda: byte_level("gpt-2", normalizer={"type": "Lowercase"}), "no name"),
        (lambda: sentencepiece(True, [("a", "b"), ("▁", "ab")]), "would become"),
        (lambda: Tokenizer(None), "tokenizers library"),
    ],
)
def test_other_tokenizers_are_refused(tokenizer, said):
    with pytest.raises(AiakqError, match=said) as refused:
        tokenizer_keys(tokenizer(), 300)
    assert refused.value.id == "gguf_not_written"


def test_tokens_that_would_say_other_texts_are_refused():
    tokenizer = byte_level("gpt-2")
    own = tokenizer.hf.backend_tokenizer
    own.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("l", "L")])
    with pytest.raises(AiakqError, match="would say"):
        tokenizer_keys(tokenizer, 300)


def test_a_token_that_is_a_whole_word_only_is_refused():
    tokenizer = byte_level("gpt-2")
    tokenizer.hf.add_tokens([AddedToken("the", single_word=True, normalized=False)])
    with pytest.raises(AiakqError, match="'the' is found as a whole word"):
        tokenizer_keys(tokenizer, 300)


def test_every_end_of_answers_is_in_the_file_or_it_is_refused():
    with pytest.raises(AiakqError, match=r"would not at \[5\]"):
        tokenizer_keys(byte_level("gpt-2"), 300, end_ids=[1, 2, 3, 5])
    _, notes = tokenizer_keys(byte_level("gpt-2"), 300, end_ids=[2])
    assert notes == ["Answers from the file also end at the tokens [1], as GGUF files mean it."]


def test_more_tokens_than_the_model_has_are_refused():
    with pytest.raises(AiakqError, match="261 tokens, and the model 200"):
        tokenizer_keys(byte_level("gpt-2"), 200)
