"""Keys of a tokenizer's settings: with the effect that they have in transformers, or named in the start-up table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.tokenizer_keys import not_applied, remark

TEXTS = ["Hello world , don't <s> hello</s> a <tool> b . 's", "<s>hello  world .  é", " hello<new>"]
WORDS = "[UNK] <s> </s> [PAD] hello Hello world wor ##ld , . ' ##s s do n ##t n't <tool> b a ▁hello ▁world ▁ ▁. ▁,"
TOKEN = {"content": "<tool>", "special": False, "lstrip": True, "rstrip": True, "normalized": False}
CLEANING = {"clean_up_tokenization_spaces": True}
#: Settings that have the same effect as in transformers, or none.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "bos": {"add_bos_token": True},
    "no bos": {"add_bos_token": False},
    "eos": {"add_eos_token": True},
    "prefix space": {"add_prefix_space": True},
    "no prefix space": {"add_prefix_space": False},
    "legacy": {"legacy": True},
    "not legacy": {"legacy": False},
    "lower case": {"do_lower_case": True},
    "upper case": {"do_lower_case": False},
    "accents": {"strip_accents": True},
    "truncation": {"truncation_side": "left", "model_max_length": 2, "max_length": 2, "truncation": True},
    "own truncation": {
        "tokenizer_truncation": {"max_length": 2, "stride": 0, "strategy": "longest_first", "direction": "left"}
    },
    "padding": {"padding_side": "left", "padding": "max_length", "max_length": 40},
    "split special tokens": {"split_special_tokens": True},
    "system prompt": {"use_default_system_prompt": True},
    "spaces": {"spaces_between_special_tokens": False},
    "named tokens": {"extra_special_tokens": {"x_token": "<tool>"}},
    "extra tokens": {"extra_special_tokens": ["<new>"]},
    "additional tokens": {"additional_special_tokens": ["<tool>", "<new>"]},
    "image token": {"image_token": "<new>"},
    "added tokens": {"added_tokens_decoder": {"500": TOKEN}},
    "no cleaning": {"clean_up_tokenization_spaces": False},
}


def saved(folder: Path, kind: str, settings: dict[str, Any], tokens: dict[str, Any] | None = None) -> Path:
    """A small tokenizer of a kind, with these settings."""
    words = WORDS.split()
    if kind == "WordPiece":
        backend = Backend(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    elif kind == "Unigram":
        backend = Backend(models.Unigram([(word, -1.0 - id) for id, word in enumerate(words)], unk_id=0))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({word: id for id, word in enumerate([*words[:4], *letters])}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "[PAD]", "[UNK]"])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if tokens is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return folder


def check_same(folder: Path) -> None:
    """Assert that prompts and answers are those of transformers."""
    from transformers import AutoTokenizer

    hf, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        assert ours.encode_pair(text, "hello") == hf(text, "hello")["input_ids"]
        for flag in (True, False):
            ids = hf.encode(text, add_special_tokens=flag)
            assert ours.encode(text, add_special_tokens=flag) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "BPE"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_has_the_effect_that_it_has_in_transformers(tmp_path: Path, kind: str, settings: dict[str, Any]):
    check_same(saved(tmp_path, kind, settings))
    assert "not applied" not in Tokenizer.load(tmp_path).describe()


@pytest.mark.parametrize(
    "name",
    ["PreTrainedTokenizerFast", "LlamaTokenizer", "BertTokenizer", "GPT2Tokenizer", "TokenizersBackend", "NoSuch"],
)
def test_a_class_has_the_effect_that_it_has_in_transformers(tmp_path: Path, name: str):
    settings = {"tokenizer_class": name, "add_bos_token": True, "do_lower_case": True}
    check_same(saved(tmp_path, {"LlamaTokenizer": "BPE", "GPT2Tokenizer": "BPE"}.get(name, "WordPiece"), settings))


@pytest.mark.parametrize(
    "tokens",
    [{"bos_token": "<new>"}, {"additional_special_tokens": ["<tool>"]}, {"eos_token": {**TOKEN, "special": True}}],
)
def test_tokens_of_special_tokens_map_are_those_of_transformers(tmp_path: Path, tokens: dict[str, Any]):
    check_same(saved(tmp_path, "BPE", {"add_bos_token": True}, tokens))


def test_cleaning_of_spaces_is_named_where_transformers_cleans(tmp_path: Path):
    forced = {**CLEANING, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    for kind, settings, is_named in (
        ("WordPiece", CLEANING, True),
        ("Unigram", CLEANING, True),
        ("BPE", CLEANING, False),
        ("BPE", forced, True),
    ):
        folder = tmp_path / f"{kind}{len(settings)}"
        folder.mkdir()
        described = Tokenizer.load(saved(folder, kind, settings)).describe()
        assert ("not applied: clean_up_tokenization_spaces True" in described) == is_named, (kind, settings)
        if not is_named:
            check_same(folder)


def test_an_unknown_setting_is_named(tmp_path: Path):
    settings = {"key_of_next_year": 3, "empty": "", "_internal": 1, "boi_token": "<s>", "prepend_bos": False}
    described = Tokenizer.load(saved(tmp_path, "BPE", settings)).describe()
    assert described.endswith("; not applied: key_of_next_year 3, prepend_bos False")
    assert not_applied({"dropout_of_spaces": 0, "add_bos_token": False, "x": None}, True) == {"dropout_of_spaces": 0}
    assert not_applied({"new key": "x" * 9, "padding_side": "left"}, is_bpe=True) == {"new key": "x" * 9}


def test_what_the_class_of_a_tokenizer_reads_is_applied():
    class Translating:
        def __init__(self, src_lang: str = "", **kwargs: Any) -> None:
            pass

    assert remark({"src_lang": "deu_Latn"}, Translating()) == ""
    assert remark({"src_lang": "deu_Latn"}, object()) == "; not applied: src_lang 'deu_Latn'"


def test_a_long_list_is_cut():
    line = remark({f"key {number}": "x" * 1000 for number in range(100)}, None)
    assert line.endswith(" and 92 more") and len(line) < 1000
