"""Tokenizers in Mistral's format: ids and bytes are those of mistral-common."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mistral_files import SPECIAL, write_tekken

from aiakq.errors import AiakqError
from aiakq.runtime.text.mistral_tokenizer import MistralTokenizer, call_id
from aiakq.runtime.text.tokenizer import TokenDecoder
from aiakq.runtime.text.tokenizer_source import TokenizerSource

TEXTS = ("hello world", " worldworld café 123!\n\n x", "[INST] is text, and </s> too", "日本", "")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CONVERSATION = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": "the world [/INST]"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0123", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "call_0123", "content": "2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("mistral_common")
    return write_tekken(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return MistralTokenizer.of(folder)


@pytest.fixture(scope="module")
def common(folder):
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Common

    return Common.from_file(folder / "tekken.json")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_of_mistral_common(text, tokenizer, common):
    words = common.instruct_tokenizer.tokenizer
    assert tokenizer.encode(text) == words.encode(text, bos=True, eos=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert TokenDecoder(tokenizer.decoder_json()).decode(ids) == text


def test_every_id_has_its_bytes(tokenizer, common):
    words = common.instruct_tokenizer.tokenizer
    assert tokenizer.vocab_size == words.n_words == 300
    assert tokenizer.special_ids == frozenset(range(31))
    for id in range(31, 300):
        assert tokenizer.token_bytes(id) == words.id_to_byte_piece(id)
    assert tokenizer.raw_tokens([3, 30]) == ["[INST]", "<SPECIAL_30>"]


def test_conversations_have_the_ids_of_mistral_common(tokenizer, common):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    changed = [dict(message) for message in CONVERSATION]
    made = call_id("call_0123")
    changed[2]["tool_calls"] = [{**CONVERSATION[2]["tool_calls"][0], "id": made}]
    changed[3]["tool_call_id"] = made
    request = ChatCompletionRequest.from_openai(changed, tools=TOOLS)
    text, ids = tokenizer.chat_tokens(CONVERSATION, tools=TOOLS)
    assert ids == common.encode_chat_completion(request).tokens
    # The mark in the user's text stays text.
    assert ids.count(SPECIAL.index("[/INST]")) == 1 and text.count("[/INST]") == 2
    assert text.startswith("<s>[SYSTEM_PROMPT]hello[/SYSTEM_PROMPT][AVAILABLE_TOOLS]")
    assert tokenizer.chat_prompt(CONVERSATION, tools=TOOLS) == text


def test_a_last_message_of_the_assistant_ends_or_goes_on(tokenizer):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    _, ended = tokenizer.chat_tokens(messages, add_generation_prompt=False)
    _, going_on = tokenizer.chat_tokens(messages, add_generation_prompt=False, continue_final_message=True)
    assert ended == [*going_on, SPECIAL.index("</s>")]


@pytest.mark.parametrize(
    "messages, arguments, said",
    [
        ([{"role": "robot", "content": "a"}], {}, "robot"),
        ([{"role": "user", "content": "a"}], {"arguments": {"enable_thinking": True}}, "enable_thinking"),
        ([{"role": "user", "content": "a"}], {"template": "{{ x }}"}, "mistral-common encodes conversations"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(messages, arguments, said, tokenizer):
    with pytest.raises(AiakqError) as refused:
        tokenizer.chat_tokens([*messages, {"role": "user", "content": "b"}], **arguments)
    assert said in str(refused.value) and "\n" not in refused.value.message


def test_auto_takes_it_only_where_there_is_no_other(folder, tmp_path):
    assert isinstance(TokenizerSource(str(folder)).load(), MistralTokenizer)
    write_tekken(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert isinstance(TokenizerSource(str(tmp_path), mode="mistral").load(), MistralTokenizer)
    with pytest.raises(AiakqError):
        TokenizerSource(str(tmp_path)).load()


def test_the_version_of_a_sentencepiece_file_is_in_its_name():
    common = pytest.importorskip("mistral_common")
    pytest.importorskip("sentencepiece")
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Common

    file = Path(common.__file__).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    tokenizer, words = MistralTokenizer(file), Common.from_file(file)
    text, ids = tokenizer.chat_tokens([{"role": "user", "content": "Café [INST]\n"}], tools=TOOLS)
    assert text.startswith("<s>[AVAILABLE_TOOLS]") and ids.count(3) == 1
    sample = "Hello  world, 日本 \t𝄞"
    ids = tokenizer.encode(sample)
    assert ids == words.instruct_tokenizer.tokenizer.encode(sample, bos=True, eos=False)
    assert tokenizer.decode(ids) == sample


def test_tools_are_never_dropped(tmp_path):
    pytest.importorskip("mistral_common")
    first = MistralTokenizer.of(write_tekken(tmp_path, version="v1", special=SPECIAL[:20]))
    with pytest.raises(AiakqError, match="tools"):
        first.chat_tokens([{"role": "user", "content": "a"}], tools=TOOLS)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(AiakqError, match=r"mistral_common, which reads it, is not installed") as missing:
        MistralTokenizer.of(write_tekken(tmp_path))
    assert "aiakq[mistral]" in str(missing.value)


@pytest.mark.parametrize("content", ["{}", "[]", '{"config": {"version": "v99"}}'])
def test_damaged_files_are_refused(content, tmp_path):
    pytest.importorskip("mistral_common")
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(AiakqError) as refused:
        MistralTokenizer.of(tmp_path)
    assert refused.value.id == "model_malformed"


def test_ordinary_tokens_that_spell_special_ones_are_refused(tmp_path):
    pytest.importorskip("mistral_common")
    write_tekken(tmp_path, special=[*SPECIAL[:-1], "hello"])
    with pytest.raises(AiakqError, match="also an ordinary one"):
        MistralTokenizer.of(tmp_path)
