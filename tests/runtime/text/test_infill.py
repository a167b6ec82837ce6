"""The prompts of models that fill in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aiakq.runtime.text.infill import Infill, find_infill
from aiakq.runtime.text.tokenizer import Tokenizer


def load(folder: Path, backend: Backend, marks: list[str]) -> tuple[Tokenizer, Infill | None]:
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer.load(folder)
    return tokenizer, find_infill(tokenizer, tokenizer.hf.get_vocab())


def byte_level() -> Backend:
    """As of Qwen and StarCoder."""
    backend = Backend(
        models.BPE({letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def spaced() -> Backend:
    """As of Llama: a space in front of every text, and a beginning."""
    letters = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Backend(models.BPE({letter: at for at, letter in enumerate(letters)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return backend


def shown(tokenizer: Tokenizer, infill: Infill, prefix: str, suffix: str) -> list[str]:
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, infill.lead + suffix))
    return tokenizer.raw_tokens(infill.prompt(*ids, with_begin=True))


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"], 2),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>"], 1),
        (["<fim-prefix>", "<fim-middle>", "<fim-suffix>"], 0),
        (["<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"], 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_middle_comes_last(tmp_path, marks, ends):
    tokenizer, infill = load(tmp_path, byte_level(), marks)
    before, middle, after = marks[:3]
    assert shown(tokenizer, infill, "ab", "c\n") == [before, "a", "b", after, "c", "Ċ", middle]
    assert set(tokenizer.raw_tokens(infill.ends)) == set(marks[3:]) and len(infill.ends) == ends
    assert shown(tokenizer, infill, "", "c") == [before, after, "c", middle]


def test_no_space_is_put_in_front_of_a_suffix(tmp_path):
    tokenizer, infill = load(tmp_path, spaced(), ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"])
    assert shown(tokenizer, infill, "ab", "cd") == ["<s>", "▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>"]
    assert tokenizer.raw_tokens(infill.ends) == ["▁<EOT>"]
    plain = [tokenizer.encode("ab", add_special_tokens=False), tokenizer.encode("\ncd", add_special_tokens=False)]
    assert tokenizer.raw_tokens(infill.prompt(*plain, with_begin=False))[0] == "▁<PRE>"


def test_mistrals_suffix_comes_first(tmp_path):
    tokenizer, infill = load(tmp_path, spaced(), ["[PREFIX]", "[SUFFIX]"])
    assert shown(tokenizer, infill, "ab", "cd") == ["<s>", "[SUFFIX]", "c", "d", "[PREFIX]", "▁", "a", "b"]


def test_other_models_do_not_fill_in(tmp_path):
    assert load(tmp_path, byte_level(), ["<fim_prefix>", "<fim_suffix>"])[1] is None
