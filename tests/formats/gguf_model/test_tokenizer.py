"""The tokenizer of a GGUF file gives the ids of the one that was converted; what is not known exactly is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from aiakq.errors import AiakqError
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.formats.gguf_model.tokenizer import chat_templates, tokenizer_files

TEXTS = (
    *("", " ", "Hello there,  world!", "It's 12345 o'clock.\n\n\tdéjà vu 日本語 🎉"),
    *("<|im_start|>user\nhi<|im_end|>", "a\r\n b"),
)
#: Pieces of a small SentencePiece model, with their scores.
PIECES = ["▁", "a", "b", "▁a", "ab", "▁ab", "▁b", "aa", "▁▁"]


def metadata_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return what the converter stores of a byte-level tokenizer."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in stored["added_tokens"]}
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in stored["model"]["merges"]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if id in special else 1 for id in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.{name}": value for name, value in changes.items()},
    }


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.{name}": value for name, value in changes.items()},
    }


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(Metadata(metadata, "x.gguf"))["tokenizer.json"]))


def test_byte_level_ids_are_those_of_the_original(example_model):
    found, original = tokenizer(metadata_of(example_model)), Tokenizer.from_file(str(example_model / "tokenizer.json"))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids and found.decode(ids) == original.decode(ids)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    found = tokenizer(sentencepiece())
    # As SentencePiece itself: "▁a" has a better score than "ab", and nothing holds "é".
    assert found.encode("ab").tokens == ["<s>", "▁ab"]
    assert found.encode("aab b").tokens == ["<s>", "▁a", "ab", "▁b"]
    assert found.encode("aé").tokens == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    assert found.decode(found.encode("aé  b").ids) == "aé  b"
    assert tokenizer(sentencepiece(**{"ggml.add_space_prefix": False})).encode("ab").tokens == ["<s>", "ab"]


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_bos_and_eos_are_added_as_the_file_says(bos, eos):
    changes = {"ggml.add_bos_token": bos, "ggml.add_eos_token": eos}
    expected = [1] * bos + [262] + [2] * eos
    assert tokenizer(sentencepiece(**changes)).encode("a").ids == expected


def test_ends_of_turns_end_answers_if_there_is_a_template(example_model):
    plain = tokenizer_files(Metadata(metadata_of(example_model), "x.gguf"))
    chat = tokenizer_files(Metadata(metadata_of(example_model, chat_template="{{ messages }}"), "x.gguf"))
    assert plain["generation_config.json"]["eos_token_id"] == [0]
    assert chat["generation_config.json"]["eos_token_id"] == [0, 2]  # <|im_end|>
    assert chat["tokenizer_config.json"]["chat_template"] == "{{ messages }}"


def test_named_templates_are_kept():
    values = {
        "chat_template": "a",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "b",
    }
    keys = Metadata(sentencepiece(**values), "x.gguf")
    assert chat_templates(keys) == [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


def test_sampling_values_become_defaults_of_requests():
    values = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    generation = tokenizer_files(Metadata(sentencepiece() | values, "x.gguf"))["generation_config.json"]
    assert (generation["temperature"], generation["top_k"], generation["repetition_penalty"]) == (0.7, 20, 1.05)


@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({"ggml.model": "bert"}, "gguf_unsupported", "bert"),
        ({"ggml.pre": "of-tomorrow"}, "gguf_unsupported", "of-tomorrow"),
        ({"ggml.pre": None}, "gguf_unsupported", "tokenizer.ggml.pre"),
        ({"ggml.of_tomorrow": True}, "gguf_unsupported", "of_tomorrow"),
        ({"ggml.tokens": [1, 2]}, "model_malformed", "tokenizer.ggml.tokens"),
        ({"ggml.tokens": "a"}, "model_malformed", "tokenizer.ggml.tokens"),
        ({"ggml.token_type": [1, 2, 3]}, "model_malformed", "tokenizer.ggml.token_type"),
        ({"ggml.token_type": ["1"]}, "model_malformed", "tokenizer.ggml.token_type"),
        ({"ggml.merges": ["no merge of these"]}, "model_malformed", "tokenizer.ggml.merges"),
        ({"ggml.merges": ["nothing"]}, "model_malformed", "nothing"),
        ({"ggml.merges": None}, "model_malformed", "tokenizer.ggml.merges"),
        ({"ggml.eos_token_id": "2"}, "model_malformed", "tokenizer.ggml.eos_token_id"),
        ({"ggml.add_bos_token": 1}, "model_malformed", "tokenizer.ggml.add_bos_token"),
        ({"chat_template": 5}, "model_malformed", "tokenizer.chat_template"),
        ({"chat_templates": [5]}, "model_malformed", "tokenizer.chat_templates"),
    ],
)
def test_another_tokenizer_is_refused_by_name(example_model, changes, kind, named):
    metadata = {key: value for key, value in metadata_of(example_model, **changes).items() if value is not None}
    with pytest.raises(AiakqError) as refused:
        tokenizer_files(Metadata(metadata, "x.gguf"))
    assert refused.value.id == kind and named in str(refused.value)


def test_sentencepiece_without_scores_is_refused():
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(AiakqError, match="scores"):
        tokenizer_files(Metadata(metadata, "x.gguf"))
