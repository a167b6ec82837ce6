"""Unknown fields are ignored by name or refused, and misspelled ones are found."""

from __future__ import annotations

import json
import time
import urllib.parse

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.template_facts import TemplateFacts
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.pooling.embeddings import EmbeddingRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.tokenization import TokenizeRequest
from aiakq.server.api.unknown_fields import IgnoredFields, UnknownFields, ignored_fields, nearest

HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    CompletionRequest: {"prompt": "Hi"},
    ChatCompletionRequest: {"messages": HI},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": HI, "max_tokens": 1},
    EmbeddingRequest: {"input": "Hi"},
    TokenizeRequest: {"prompt": "Hi"},
}


def parse(model, fields, mode: str = "ignore") -> tuple[object, list[str]]:
    """Return the request and the names of its ignored fields."""
    names = IgnoredFields()
    token = ignored_fields.set(names)
    try:
        return parse_body(model, json.dumps(BODIES[model] | fields).encode(), UnknownFields(mode)), list(names.names)
    finally:
        ignored_fields.reset(token)


def refusal(model, fields, mode: str = "ignore") -> tuple[str, str | None, str]:
    with pytest.raises(AiakqError) as caught:
        parse(model, fields, mode)
    return caught.value.id, caught.value.param, caught.value.remedy


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_unknown_fields_are_ignored_by_name(model):
    assert parse(model, {"colour": 1})[1] == ["colour"]
    assert parse(model, {"colour": None})[1] == []
    assert refusal(model, {"colour": 1}, "refuse")[:2] == ("unknown_field", "colour")


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_misspelled_fields_are_refused_with_the_name_that_was_meant(model):
    for name in ("modle", "Model", "mo-del"):
        assert refusal(model, {name: 1}) == ("unknown_field", name, "Did you mean model?")
    assert parse(model, {"modle": 1}, "warn")[1] == ["modle"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("Temperature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("TopP", "top_p"),
        ("topk", "top_k"),
        ("N", "n"),
        ("stpo", "stop"),
        ("seeds", "seed"),
        ("sed", "seed"),
        ("stp", "stop"),
        ("usr", None),
        ("eho", "echo"),
        ("see", None),
        ("top", None),
        ("nn", None),
        ("frequency_penality", "frequency_penalty"),
        ("m", None),
        ("colour", None),
        ("x" * 5000, None),
        ("", None),
        ("__class__", None),
        ("temp", None),
        (" temperature", "temperature"),
        ("temperature_", "temperature"),
        ("_max_tokens", "max_tokens"),
        ("--top-p", "top_p"),
    ],
)
def test_the_nearest_known_name_is_found(name, expected):
    assert nearest(name, frozenset(CompletionRequest.model_fields)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"messages": [*HI, {"role": "user", "contents": "a"}]}, "messages[1].contents"),
        ({"messages": [{"role": "assistant", "tool_call": []}]}, "messages[0].tool_call"),
        ({"response_format": {"type": "json_schema", "json_shema": {}}}, "response_format.json_shema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools[0].function.paramters"),
        ({"options": {"temprature": 0}}, "options.temprature"),
    ],
)
def test_misspelled_fields_of_nested_objects_are_refused(fields, param):
    assert refusal(ChatCompletionRequest, fields)[:2] == ("unknown_field", param)


def test_unknown_fields_of_nested_objects_are_ignored_by_name():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "colour": 1}, "index": 0}
    fields = {
        "messages": [*HI, {"role": "assistant", "tool_calls": [call], "colour": 1, "refusal": "no"}] * 2,
        "stream_options": {"colour": 1},
        "tools": [{"type": "function", "function": {"name": "f", "colour": 1}}],
    }
    names = ["stream_options.colour", "messages[].tool_calls[].function.colour"]
    assert sorted(parse(ChatCompletionRequest, fields)[1]) == sorted(names)


def test_the_header_has_ten_escaped_names_of_64_characters():
    found = IgnoredFields()
    found.names = dict.fromkeys(["a\r\nb: c", "\u00e9" * 60, "x" * 500, "\ud800", *(f"name{at}" for at in range(90))])
    names = found.header().split(", ")
    assert len(names) == 10 and names[0] == "a%0D%0Ab%3A%20c" and names[2] == "x" * 64
    assert all(len(name) <= 64 and name.isascii() and name.isprintable() for name in names)
    assert names[1] == "%C3%A9" * 10 and names[3] == "%3F"


def test_every_name_in_the_header_can_be_read_back():
    names = ["", "a,b", '"', "\x00\x1b\r\n", "\u0644\u063a\u0629", "\U0001f600" * 40, " ", "%", '""']
    found = IgnoredFields()
    found.names = dict.fromkeys(names)
    shown = found.header().split(", ")
    assert shown[0] == '""' and shown[-1] == "%22%22" and len(shown) == len(names)
    assert all(name.isascii() and name.isprintable() and name == name.strip() and len(name) <= 64 for name in shown)
    read = [urllib.parse.unquote(name, errors="strict") for name in shown]
    assert read[1:5] == names[1:5] and read[5] == "\U0001f600" * 5 and read[6:] == names[6:]
    found.names = dict.fromkeys(["messages[].content[].", "a."])
    assert found.header() == 'messages[].content[]."", a.""'


@pytest.mark.parametrize("model", BODIES)
def test_requests_with_hostile_names_are_answered(model):
    fields = {"": 1, "a,b": 1, "\x00": 1, "\u0644": 1, '"': 1, ".": 1, "[0]": 1} | {
        f"q{at}\u00e9": 1 for at in range(9_999)
    }
    request, ignored = parse(model, fields)
    assert request is not None and len(ignored) == len(fields) and ignored[0] == ""


FIELDS_OF_OTHERS = (
    *("conversation", "template_id", "cached", "test", "top", "use", "set", "key", "tag", "app", "ttl", "raw"),
    *("character", "preset", "name1", "thread_id", "session", "version", "language", "location"),
)


@pytest.mark.parametrize("name", FIELDS_OF_OTHERS)
def test_names_that_are_words_of_their_own_are_no_misspellings(name):
    assert nearest(name, ChatCompletionRequest._known_names()) is None


def test_many_unknown_fields_cost_little():
    began = time.process_time()
    parse(CompletionRequest, {f"field_{at}_{at * 7919}": 1 for at in range(20_000)})
    assert time.process_time() - began < 2.0


def _block(**part) -> dict:
    return {"messages": [{"role": "user", "content": [part]}]}


def _item(**item) -> dict:
    return {"input": [{"role": "user", "content": "Hi"}, item]}


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, _block(type="text", text="a", anotations=[]), "messages[0].content[0].anotations"),
        (MessagesRequest, _block(type="text", text="a", cache_contrl={}), "messages[0].content[0].cache_contrl"),
        (MessagesRequest, {"system": [{"type": "text", "texts": "a"}]}, "system[0].texts"),
        (MessagesRequest, {"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents"),
        (
            MessagesRequest,
            _block(type="tool_result", tool_use_id="a", isError=True),
            "messages[0].content[0].isError",
        ),
        (
            MessagesRequest,
            _block(type="tool_result", tool_use_id="a", content=[{"type": "text", "txet": "b"}]),
            "messages[0].content[0].content[0].txet",
        ),
        (ResponsesRequest, _item(type="message", role="user", conten="a"), "input[1].conten"),
        (
            ResponsesRequest,
            _item(role="user", content=[{"type": "input_text", "Text": "a"}]),
            "input[1].content[0].Text",
        ),
        (
            ChatCompletionRequest,
            _block(type="input_audio", input_audio={"data": "a", "fromat": "wav"}),
            "messages[0].content[0].input_audio.fromat",
        ),
        (ResponsesRequest, _item(type="function_call", callId="a", name="f", arguments="{}"), "input[1].callId"),
        (ResponsesRequest, _item(type="function_call_output", call_id="a", ouput="b"), "input[1].ouput"),
        (ResponsesRequest, _item(type="reasoning", sumary=[]), "input[1].sumary"),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "paramters": {}}]}, "tools[0].paramters"),
        (
            ResponsesRequest,
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "stric": True}]}
                ]
            },
            "tools[0].tools[0].stric",
        ),
        (ResponsesRequest, {"tool_choice": {"type": "function", "nmae": "f"}}, "tool_choice.nmae"),
        (ChatCompletionRequest, {"tool_choice": {"type": "function", "fuction": {}}}, "tool_choice.fuction"),
        (
            ChatCompletionRequest,
            {"tool_choice": {"type": "function", "function": {"Name": "f"}}},
            "tool_choice.function.Name",
        ),
    ],
    ids=str,
)
def test_misspelled_fields_of_parts_items_and_tools_are_refused(model, fields, param):
    assert refusal(model, fields)[:2] == ("unknown_field", param)
    parse(model, fields, "warn")
    assert parse(model, fields, "refuse")[1] == []


@pytest.mark.parametrize(
    ("model", "fields", "names"),
    [
        (ChatCompletionRequest, _block(type="text", text="a", colour=1), ["messages[].content[].colour"]),
        (MessagesRequest, _block(type="text", text="a", colour=1), ["messages[].content[].colour"]),
        (
            ChatCompletionRequest,
            _block(type="image_url", image_url={"url": "a", "detail": "low", "max_pixels": 9}, uuid="b"),
            ["messages[].content[].image_url.max_pixels"],
        ),
        (
            ChatCompletionRequest,
            _block(type="input_audio", input_audio={"data": "a", "format": "wav", "rate": 8000}),
            ["messages[].content[].input_audio.rate"],
        ),
        (
            MessagesRequest,
            _block(type="image", source={"type": "url", "url": "a", "crop": [0, 0]}),
            ["messages[].content[].source.crop"],
        ),
        (MessagesRequest, {"messages": [{**HI[0], "colour": 1}] * 3}, ["messages[].colour"]),
        (ResponsesRequest, _item(role="user", content="a", colour=1), ["input[].colour"]),
        (ResponsesRequest, _item(type="function_call_output", call_id="a", output="b", colour=None), []),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "colour": 1}]}, []),  # for the template
        (ResponsesRequest, {"tools": [{"type": "web_search", "filter": {}}]}, []),
        (MessagesRequest, {"thinking": {"type": "enabled", "display": "omitted"}}, []),
        (MessagesRequest, _block(type="text", text="a", cache_control={"type": "ephemeral"}, citations=None), []),
        (MessagesRequest, _block(type="thinking", thinking="a", signature="b"), []),
        (ResponsesRequest, _item(type="reasoning", id="a", summary=[], encrypted_content="b", status=None), []),
    ],
    ids=str,
)
def test_other_fields_of_parts_items_and_tools_are_ignored_by_name(model, fields, names):
    assert parse(model, fields)[1] == names


def test_objects_of_the_wrong_form_have_no_unknown_fields():
    for content in (1, [1], [[1]], {"type": 1, "txet": 1}, [{"type": ["text"]}], None):
        parse(MessagesRequest, {"messages": [{"role": "user", "content": content}, 1, None], "system": content})
        parse(ResponsesRequest, {"input": [{"type": "message", "content": content}, 1, {"type": 1}], "tools": [1]})
    deep: list = []
    for _ in range(50):
        deep = [{"type": "tool_result", "tool_use_id": "a", "content": deep}]
    parse(MessagesRequest, {"messages": [{"role": "user", "content": deep}]})


def test_many_unknown_fields_of_tools_cost_little():
    tools = [{"type": "function", "name": "f", **{f"field_{at}_{at * 7919}": 1 for at in range(20_000)}}]
    began = time.process_time()
    parse(ResponsesRequest, {"tools": tools})
    assert time.process_time() - began < 2.0


def test_names_that_the_template_does_not_show_are_ignored_by_name():
    fields = {"messages": [*HI, {"role": "user", "content": "a", "name": "Ada"}]}
    for shows, expected in ((False, ["messages[].name"]), (True, [])):
        token = ignored_fields.set(IgnoredFields())
        try:
            request = parse_body(ChatCompletionRequest, json.dumps(fields).encode(), UnknownFields("ignore"))
            request.name_hidden(TemplateFacts(shows_names=shows), UnknownFields("ignore"))
            assert list(ignored_fields.get().names) == expected
        finally:
            ignored_fields.reset(token)
