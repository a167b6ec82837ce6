"""Content of messages, with the parts of several APIs."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.media_parts import take_media
from aiakq.runtime.text.message_parts import join_text_parts, read_message


def read(content, role="assistant", **fields):
    return read_message({"role": role, "content": content, **fields}, "messages[0]")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "text": "A"}, "A"),
        ({"type": "input_text", "text": "A"}, "A"),
        ({"type": "output_text", "text": "A", "annotations": []}, "A"),
        ({"type": "refusal", "refusal": "A"}, "A"),
        ({"text": "A"}, "A"),
        ("A", "A"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_text_is_read_under_every_name(part, text, role):
    [message] = read([part, "B"], role)
    assert message["content"] == [{"type": "text", "text": text}, {"type": "text", "text": "B"}]
    assert join_text_parts([part, "B"], "x") == f"{text}\nB"
    assert join_text_parts(part, "x") == text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "reasoning", "text": "Hm."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning_text", "text": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
    ],
)
def test_reasoning_is_read_as_reasoning(part):
    [message] = read([part, {"type": "text", "text": "Yes."}])
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    [message] = read([part], reasoning="Own.")
    assert message["reasoning_content"] == "Own." and message["content"] == ""


def test_reasoning_that_cannot_be_read_is_left_out():
    [message] = read([{"type": "redacted_thinking", "data": "x"}, {"type": "reasoning", "encrypted": "x"}, "Yes."])
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}


def test_calls_and_results_among_parts_become_those_of_chat():
    [message] = read(
        [{"type": "text", "text": "Look."}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]
    )
    assert message["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}
    assert read([result, {**result, "content": None}, "And?"], "user") == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]


def test_older_forms_become_the_current_ones():
    call = {"name": "f", "arguments": "{}"}
    [message] = read(None, function_call=call)
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    both = [{"id": "1", "type": "function", "function": call}]
    [message] = read(None, function_call=call, tool_calls=both)
    assert message["tool_calls"] == both and message["content"] is None and "function_call" not in message
    assert read("1", "function", name="f") == [{"role": "tool", "content": "1", "name": "f"}]


def test_a_refusal_is_a_text_of_its_message():
    assert read(None, refusal="No.") == [{"role": "assistant", "content": "No."}]
    assert read("Yes.", refusal="No.") == [{"role": "assistant", "content": "Yes.\nNo."}]


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_an_empty_text(content):
    assert read(content) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("content", "id", "param"),
    [
        (5, "invalid_type", "content"),
        ([5], "invalid_type", "content[0]"),
        (["A", {"type": 5}], "invalid_type", "content[1].type"),
        ([{"kind": "text"}], "missing_field", "content[0].type"),
        ([{"type": "text"}], "missing_field", "content[0].text"),
        ([{"type": "text", "text": 5}], "invalid_type", "content[0].text"),
        ([{"type": "input_audio", "input_audio": {}}], "unsupported_parameter", "content[0].type"),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}], "invalid_type", "content[0].input"),
        ([{"type": "tool_result", "content": "1"}], "unsupported_parameter", "content[0].type"),
    ],
)
def test_what_is_no_text_is_named(content, id, param):
    with pytest.raises(AiakqError) as caught:
        read(content)
    assert (caught.value.id, caught.value.param) == (id, f"messages[0].{param}")


def test_messages_of_other_roles_may_have_everything():
    [message] = read_message({"role": "model", "content": [{"type": "thinking", "thinking": "Hm."}, "A"]}, "x")
    assert message["reasoning_content"] == "Hm." and message["role"] == "model"


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "id", "param"),
    [
        ({"role": None}, "missing_field", "role"),
        ({"role": ["user"]}, "invalid_type", "role"),
        ({"name": 1}, "invalid_type", "name"),
        ({"reasoning_content": ["Hm."]}, "invalid_type", "reasoning_content"),
        ({"tool_call_id": 1}, "invalid_type", "tool_call_id"),
        ({"tool_calls": "x"}, "invalid_type", "tool_calls"),
        ({"tool_calls": {"0": CALL}}, "invalid_type", "tool_calls"),
        ({"tool_calls": [CALL, "x"]}, "invalid_type", "tool_calls[1]"),
        ({"tool_calls": [{"name": "f"}]}, "missing_field", "tool_calls[0].function"),
        ({"tool_calls": [{"function": "f"}]}, "invalid_type", "tool_calls[0].function"),
        ({"tool_calls": [{"function": {}}]}, "missing_field", "tool_calls[0].function.name"),
        ({"tool_calls": [{"function": {"name": 1}}]}, "invalid_type", "tool_calls[0].function.name"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "invalid_type",
            "tool_calls[0].function.arguments",
        ),
        ({"function_call": "f"}, "invalid_type", "function_call"),
        ({"function_call": {"arguments": "{}"}}, "missing_field", "function_call.name"),
    ],
)
@pytest.mark.parametrize("content", ["A", None])
def test_a_field_of_another_type_is_refused_with_its_path(fields, id, param, content):
    """Offline, and in calibration data, where no model of a request has checked it before."""
    with pytest.raises(AiakqError) as caught:
        read_message({"role": "assistant", "content": content, **fields}, "messages[0]")
    assert caught.value.id == id and caught.value.param == f"messages[0].{param}"
    assert len(str(caught.value).splitlines()) == 1


def test_fields_that_are_null_or_empty_are_absent():
    empty = {"name": None, "tool_calls": None, "function_call": None, "reasoning": None, "tool_call_id": None}
    assert read("A", **empty)[0]["content"] == "A"
    assert "tool_calls" not in read("A", tool_calls=[])[0]


def test_images_keep_their_place_among_texts_and_results():
    image, result = (
        {"type": "image_url", "image_url": {"url": "a"}},
        {"type": "tool_result", "tool_use_id": "1", "content": "r"},
    )
    messages = read_message({"role": "user", "content": [result, "A", image, "B", image]}, "messages[0]")
    assert [each["role"] for each in messages] == ["tool", "user"]
    bare, images = take_media(messages)
    texts = [{"type": "text", "text": text} for text in "AB"]
    assert bare[1]["content"] == [texts[0], {"type": "image"}, texts[1], {"type": "image"}]
    assert [each.source().url for each in images] == ["a", "a"] and images[1].path == "messages[0].content[4]"


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "image_url", "image_url": "u"}, "u"),
        ({"type": "image_url", "image_url": {"url": "u", "detail": "high"}}, "u"),
        ({"type": "input_image", "image_url": "u", "detail": "auto"}, "u"),
        ({"type": "image", "source": {"type": "url", "url": "u"}}, "u"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
            "data:image/png;base64,AA",
        ),
        ({"type": "image", "url": "u"}, "u"),
    ],
)
def test_images_of_every_api_are_read(part, url):
    [message] = read_message({"role": "user", "content": [part]}, "x")
    _, [image] = take_media([message])
    assert image.source().url == url


@pytest.mark.parametrize(
    ("part", "id", "param"),
    [
        ({"type": "image_url"}, "missing_field", "image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "invalid_type", "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "u", "detail": "huge"}}, "value_out_of_range", "detail"),
        ({"type": "input_image", "file_id": "f"}, "unsupported_parameter", "file_id"),
        ({"type": "image", "source": 5}, "invalid_type", "source"),
        ({"type": "image", "source": {"type": "file"}}, "unsupported_parameter", "source.type"),
        ({"type": "image"}, "missing_field", "source"),
        ({"type": "image_pil", "image_pil": "u"}, "invalid_type", "image_pil"),
    ],
)
def test_wrong_images_are_named(part, id, param):
    [message] = read_message({"role": "user", "content": [part]}, "messages[0]")
    _, [image] = take_media([message])
    with pytest.raises(AiakqError) as caught:
        image.source()
    assert (caught.value.id, caught.value.param) == (id, f"messages[0].content[0].{param}")


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_users_have_images(role):
    with pytest.raises(AiakqError, match="only text is read"):
        read_message({"role": role, "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "x")
