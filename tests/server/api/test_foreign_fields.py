"""Fields of other servers are translated, ignored or refused, each by what its value means."""

from __future__ import annotations

import json

import pytest

from aiakq.errors import AiakqError
from aiakq.server.api import foreign_fields
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.pooling.embeddings import EmbeddingRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.structured_fields import ResponseFormat
from aiakq.server.api.tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from aiakq.server.api.unknown_fields import IgnoredFields, UnknownFields, ignored_fields

HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    CompletionRequest: {"prompt": "Hi"},
    ChatCompletionRequest: {"messages": HI},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": HI, "max_tokens": 8},
    EmbeddingRequest: {"input": "Hi"},
    TokenizeRequest: {},
    TokenizeChatRequest: {"messages": HI},
    DetokenizeRequest: {"tokens": [1]},
}


def parse(model, fields):
    return parse_body(model, json.dumps(BODIES[model] | fields).encode(), UnknownFields("ignore"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"n_predict": 5.0}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"random_seed": 3}, {"seed": 3}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"options": {"temperature": 0.5, "num_ctx": 9, "num_predict": 4}}, {"temperature": 0.5, "max_tokens": 4}),
        ({"options": {"seed": 3, "stop": ["a"], "top_k": 5}}, {"seed": 3, "stop": ["a"], "top_k": 5}),
        ({"n_probs": 2}, {"logprobs": 2}),
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
        ({"grammar": ""}, {"guided_grammar": None}),
        ({"grammar": {"type": "regex", "value": "a"}}, {"guided_regex": "a"}),
        ({"json_schema": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"format": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"temp": 0.5, "freq_penalty": 1, "rep_pen": 1.1}, {"temperature": 0.5, "frequency_penalty": 1}),
        ({"stop_words": ["a"], "bad_words_list": ["b"]}, {"stop": ["a"], "bad_words": ["b"]}),
        ({"stop_sequence": "a", "sampler_seed": 3}, {"stop": ["a"], "seed": 3}),
        ({"tokens_to_generate": 5, "streaming": True}, {"max_tokens": 5, "stream": True}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"json_mode": True}, {"response_format": ResponseFormat(type="json_object")}),
        ({"truncate": 3}, {"truncate_prompt_tokens": 3}),
        ({"return_full_text": False}, {"echo": False}),
    ],
    ids=str,
)
def test_fields_of_other_servers_are_translated(fields, expected):
    request = parse(CompletionRequest, fields)
    assert {name: getattr(request, name) for name in expected} == expected


def test_fields_are_translated_to_those_of_each_api():
    assert parse(ResponsesRequest, {"num_predict": 5}).max_output_tokens == 5
    assert parse(ResponsesRequest, {"max_tokens": 5, "stop": "a"}).max_output_tokens == 5
    assert parse(MessagesRequest, {"stop": "a"}).stop_sequences == ["a"]
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse(MessagesRequest, {"output_format": schema}).output_config.format.schema_ == {"type": "object"}
    chat = parse(ChatCompletionRequest, {"n_probs": 2, "format": "json"})
    assert (chat.logprobs, chat.top_logprobs, chat.response_format.type) == (True, 2, "json_object")
    nested = parse(ChatCompletionRequest, {"response_format": {"type": "json_object", "schema": {"type": "array"}}})
    assert nested.response_format.type == "json_schema"
    assert nested.response_format.json_schema.schema_ == {"type": "array"}
    assert parse(EmbeddingRequest, {"output_dimension": 4}).dimensions == 4
    thought = parse(ChatCompletionRequest, {"messages": [{"role": "assistant", "thinking": "Hm", "content": "a"}]})
    assert thought.messages[0].to_dicts("")[0]["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        *(({name: 7}, {"thinking_token_budget": 7}) for name in ("thinking_budget", "thinking_budget_tokens")),
        *(({name: 7}, {"thinking_token_budget": 7}) for name in ("reasoning_budget", "reasoning_budget_tokens")),
        *(({name: 0}, {"thinking_token_budget": 0}) for name in ("reasoning_max_tokens", "max_thinking_tokens")),
        ({"reasoning_budget": -1}, {"thinking_token_budget": -1}),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"thinking_token_budget": 7}),
        ({"thinking": {"type": "disabled", "budget_tokens": 7}}, {"thinking_token_budget": None}),
        ({"thinking": {"type": "adaptive"}}, {"thinking_token_budget": None}),
        ({"reasoning": {"max_tokens": 7, "exclude": True}}, {"thinking_token_budget": 7, "include_reasoning": False}),
        ({"custom_params": {"thinking_budget": 7, "other": 1}}, {"thinking_token_budget": 7}),
        ({"thinkingConfig": {"thinkingBudget": 7, "includeThoughts": False}}, {"include_reasoning": False}),
        ({"google": {"thinking_config": {"thinking_budget": 7}}}, {"thinking_token_budget": 7}),
        ({"google": {"safety_settings": []}}, {"thinking_token_budget": None}),
        ({"nvext": {"max_thinking_tokens": 7, "guided_regex": "a"}}, {"thinking_token_budget": 7, "guided_regex": "a"}),
    ],
    ids=str,
)
def test_budgets_of_other_servers_are_translated(fields, expected):
    request = parse(ChatCompletionRequest, fields)
    assert {name: getattr(request, name) for name in expected} == expected


def test_levels_of_other_servers_are_efforts():
    request = parse(ChatCompletionRequest, {"thinking_config": {"thinking_level": "LOW"}})
    assert request.switches("{{ reasoning_effort }}") == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 0, "mirostat_tau": 5.0},
        {"typical_p": 1.0, "tfs_z": 1, "top_a": 0},
        {"keep_alive": "5m", "cache_prompt": True, "id_slot": 0},
        {"repeat_last_n": 64, "repeat_penalty": 1.0},
        {"user": "a", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": {"type": "content"}},
        {"cache_control": {"type": "ephemeral"}, "prompt_cache_key": "a", "safety_identifier": "a"},
        {"modalities": ["text"], "num_beams": 1, "top_n_sigma": -1, "dry_multiplier": 0.0, "xtc_probability": 0},
        {"timeout": 600, "provider": {"order": []}, "models": ["a"], "session_id": "a"},
    ],
    ids=str,
)
def test_fields_whose_value_changes_nothing_are_ignored_in_silence(fields):
    names = IgnoredFields()
    ignored_fields.set(names)
    for model in (CompletionRequest, ChatCompletionRequest):
        parse(model, fields)
    assert not names.names


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (CompletionRequest, {"mirostat": 2}, "mirostat"),
        (CompletionRequest, {"mirostat": True}, "mirostat"),
        (CompletionRequest, {"typical_p": 0.5}, "typical_p"),
        (CompletionRequest, {"top_a": 0.1}, "top_a"),
        (CompletionRequest, {"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        (CompletionRequest, {"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        (CompletionRequest, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        (CompletionRequest, {"num_predict": 5, "max_tokens": 6}, "num_predict"),
        (CompletionRequest, {"messages": HI}, "messages"),
        (CompletionRequest, {"extra_body": {"top_k": 1}}, "extra_body"),
        (ChatCompletionRequest, {"prompt": "Hi"}, "prompt"),
        (ChatCompletionRequest, {"system": "Be brief."}, "system"),
        (ChatCompletionRequest, {"images": ["a"]}, "images"),
        (CompletionRequest, {"multi_modal_data": {"audio": "a"}}, "multi_modal_data"),
        (ChatCompletionRequest, {"video": "a"}, "video"),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, None),
        (ResponsesRequest, {"response_format": {"type": "json_object"}}, "response_format"),
        (ResponsesRequest, {"n": 2}, "n"),
        *((CompletionRequest, {name: {"temperature": 1}}, name) for name in ("sampling_params", "generationConfig")),
        (ChatCompletionRequest, {"system_prompt": "Be brief."}, "system_prompt"),
        (ChatCompletionRequest, {"session_params": {"id": "a"}}, "session_params"),
        (MessagesRequest, {"previous_response_id": "resp_a"}, "previous_response_id"),
        (CompletionRequest, {"repetition_penalty": 1.1, "repetition_penalty_range": 9}, "repetition_penalty_range"),
        (ChatCompletionRequest, {"responseMimeType": "application/json"}, "responseMimeType"),
        (ChatCompletionRequest, {"rep_pen": 1.1, "rep_pen_range": 64}, "rep_pen_range"),
        (ResponsesRequest, {"candidateCount": 2}, "candidateCount"),
        (MessagesRequest, {"prefill": "Yes"}, "prefill"),
        (MessagesRequest, {"logprobs": True}, "logprobs"),
        (ChatCompletionRequest, {"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
        (ChatCompletionRequest, {"think_stop_sentence": "So."}, "think_stop_sentence"),
        (ChatCompletionRequest, {"nvext": {"use_raw_prompt": True}}, "nvext"),
        (ChatCompletionRequest, {"google": {"cached_content": "a"}}, "google"),
        (EmbeddingRequest, {"truncate": "MIDDLE"}, "truncate"),
        (EmbeddingRequest, {"truncate": 5}, "truncate"),
        (EmbeddingRequest, {"truncate": True, "truncation_side": "left"}, "truncate"),
        (EmbeddingRequest, {"lora_path": "a"}, "lora_path"),
        (EmbeddingRequest, {"audio_data": ["a"]}, "audio_data"),
    ],
    ids=str,
)
def test_fields_whose_value_would_change_the_answer_are_refused_by_name(model, fields, param):
    with pytest.raises(AiakqError) as caught:
        parse(model, fields)
    assert caught.value.id == "unsupported_parameter"
    assert caught.value.param == (param or "messages[0].prefix")


@pytest.mark.parametrize("model", [ResponsesRequest, MessagesRequest])
def test_what_chat_refuses_is_not_ignored_by_other_apis(model):
    """Unless it is a hint."""
    names = {name for name, field in ChatCompletionRequest.unsupported_fields.items() if not field.hint}
    names |= {"include_reasoning", "return_tokens_as_token_ids", "add_special_tokens", "documents", "suffix"}
    for name in names - model.model_fields.keys():
        with pytest.raises(AiakqError) as caught:
            parse(model, {name: "something"})
        assert (caught.value.id, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("model", "name", "value", "neutral"),
    [
        (ResponsesRequest, "previous_input_messages", HI, []),
        (ResponsesRequest, "enable_response_messages", True, False),
        (ResponsesRequest, "include_reasoning", False, True),
        (MessagesRequest, "documents", [{"text": "a"}], []),
        (MessagesRequest, "parallel_tool_calls", False, True),
        (MessagesRequest, "use_beam_search", True, False),
    ],
    ids=str,
)
def test_neutral_values_of_fields_of_other_routes_are_accepted(model, name, value, neutral):
    parse(model, {name: neutral})
    parse(model, {name: None})
    with pytest.raises(AiakqError) as caught:
        parse(model, {name: value})
    assert (caught.value.id, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"parts": [{"text": "Hi"}, {"text": "!"}]}, [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]),
        ({"parts": [{"type": "text", "text": "Hi"}], "content": ""}, [{"type": "text", "text": "Hi"}]),
        ({"parts": [{"type": "text", "text": "Hi"}], "content": "Hi"}, "Hi"),
        ({"parts": [], "content": "Hi"}, "Hi"),
    ],
    ids=str,
)
def test_parts_of_a_message_without_content_are_its_content(message, content):
    request = parse(ChatCompletionRequest, {"messages": [{"role": "user", **message}]})
    assert request.messages[0].to_dicts("messages[0]")[0]["content"] == content


@pytest.mark.parametrize("part", [{"type": "file", "url": "a"}, {"type": "tool-find", "input": {}}], ids=str)
def test_parts_of_a_message_that_are_no_text_are_refused_by_name(part):
    with pytest.raises(AiakqError) as caught:
        parse(ChatCompletionRequest, {"messages": [{"role": "user", "parts": [part]}]}).messages[0].to_dicts(
            "messages[0]"
        )
    assert (caught.value.id, caught.value.param) == ("unsupported_parameter", "messages[0].content[0].type")


def test_a_translated_field_of_the_wrong_type_is_refused_by_its_own_name():
    with pytest.raises(AiakqError) as caught:
        parse(CompletionRequest, {"num_predict": "five"})
    assert (caught.value.id, caught.value.param) == ("invalid_type", "num_predict")
    with pytest.raises(AiakqError) as caught:
        parse(ChatCompletionRequest, {"thinking": {"type": "enabled", "budget_tokens": "five"}})
    assert (caught.value.id, caught.value.param) == ("invalid_type", "thinking")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, (None, None)),
        ("NONE", (None, None)),
        (True, (-1, "right")),
        ("END", (-1, "right")),
        ("START", (-1, "left")),
    ],
)
def test_texts_to_embed_are_cut_as_other_servers_cut_them(value, expected):
    request = parse(EmbeddingRequest, {"truncate": value})
    assert (request.truncate_prompt_tokens, request.truncation_side) == expected


def test_names_in_the_table_are_single_words():
    tables = [getattr(foreign_fields, name) for name in dir(foreign_fields) if name.endswith("_FIELDS")]
    assert len(tables) == 9 and all(name.split() == [name] for table in tables for name in table)


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"content": "a"}, False),  # as llama.cpp, not as vLLM
        ({"content": "a", "add_special": None}, False),
        ({"content": "a", "add_special": True}, True),
        ({"add_special": True, "content": "a"}, True),
        ({"content": "a", "add_special_tokens": True}, True),
        ({"content": "a", "add_special": False, "with_pieces": False, "parse_special": True}, False),
        ({"prompt": "a"}, None),
        ({"prompt": "a", "add_special": False}, False),
        ({"content": ""}, False),
    ],
    ids=str,
)
def test_texts_for_llama_cpp_are_tokenized_with_its_defaults(fields, special):
    request = parse(TokenizeRequest, fields)
    assert request.text() == fields.get("content", fields.get("prompt")) and request.add_special_tokens is special


@pytest.mark.parametrize(
    ("model", "fields", "code", "param"),
    [
        (TokenizeRequest, {"content": "a", "parse_special": False}, "unsupported_parameter", "parse_special"),
        (TokenizeRequest, {"content": "a", "prompt": "b"}, "unsupported_parameter", "content"),
        (TokenizeRequest, {"content": ["a", 5]}, "invalid_type", "content"),
        (TokenizeRequest, {"content": "a", "add_special": "yes"}, "invalid_type", "add_special"),
        (
            TokenizeRequest,
            {"prompt": "a", "truncate_prompt_tokens": 3},
            "unsupported_parameter",
            "truncate_prompt_tokens",
        ),
        (TokenizeChatRequest, {"content": "a"}, "unsupported_parameter", "content"),
        (DetokenizeRequest, {"skip_special_tokens": True}, "unsupported_parameter", "skip_special_tokens"),
    ],
    ids=str,
)
def test_tokenization_that_would_differ_is_refused_by_name(model, fields, code, param):
    with pytest.raises(AiakqError) as failure:
        parse(model, fields)
    assert (failure.value.id, failure.value.param) == (code, param)


@pytest.mark.parametrize("fields", [{}, {"prompt": None}, {"contents": None}, {"add_special": True}], ids=str)
def test_a_text_to_tokenize_is_required(fields):
    with pytest.raises(AiakqError) as failure:
        parse(TokenizeRequest, fields).text()
    assert (failure.value.id, failure.value.param) == ("missing_field", "prompt")
