"""The structure of JSON bodies: depth, number of keys, duplicate keys."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.routes import load_routes
from aiakq.server.api.tokenization import DetokenizeRequest
from aiakq.server.http.body import MAX_DEPTH, MAX_KEYS, as_utf8, check_structure

ARGS = checked({"model": "m", "enable_admin_routes": True}, server=True)
DEEP = b'{"prompt": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": {"b": 1}, "c": {"b": 1}}',
        b'[{"a": 1}, {"a": 1}]',
        json.dumps({"prompt": "[{" * 1000 + '\\" ' + '"' + "[" * 100}).encode(),
        json.dumps([[1]] * 1000).encode(),
        json.dumps({str(i): 0 for i in range(MAX_KEYS)}).encode(),
        DEEP,
        b"",
        b"{",
        b'{"a": ',
        b"\xff\xfe",
        b'{"a": ' + b"1" * 5000 + b"}",
        b"null",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_valid_and_malformed_bodies_pass_the_structure_check(body):
    check_structure(body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "a", "model": "b"}', "duplicate_key"),
        (b'{"a": [{"\\u0062": 1, "b": 2}]}', "duplicate_key"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "duplicate_key"),
        (DEEP.replace(b"[]", b"[[]]"), "invalid_json"),
        (b"[" * 1_000_000, "invalid_json"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "invalid_json"),
        (b'{"a": [' + b"[]," * MAX_KEYS + b"[]]}", "invalid_json"),
        (json.dumps([{str(i): 0 for i in range(MAX_KEYS // 2 + 1)}] * 2).encode(), "invalid_json"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_deep_bodies_and_duplicate_keys_are_refused(http, body, code):
    with pytest.raises(AiakqError) as caught:
        check_structure(body)
    assert caught.value.id == code
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = http.post(route, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == code


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "end",
    [b'"' + b'\\"' * (1 << 20), b'"' + b'\\"' * (1 << 20) + b"\\", b'"' * (1 << 20)],
    ids=["open", "escape", "quotes"],
)
def test_unterminated_strings_are_checked_in_linear_time(end):
    """A search that begins anew at every quotation mark would take days for these two megabytes."""
    check_structure(b'{"a": [' + b"[]," * 100 + end)


@pytest.mark.timeout(60)
def test_validation_stops_at_the_first_wrong_list_entry():
    """Reporting every entry would block the server for many seconds."""
    for model, name in (
        (CompletionRequest, "stop_token_ids"),
        (ChatCompletionRequest, "messages"),
        (DetokenizeRequest, "tokens"),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(b'{"%b": [' % name.encode() + b'"a",' * (1 << 19) + b'"a"], "prompt": "a"}')
        assert len(caught.value.errors()) <= 2, name


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_byte_order_mark_is_skipped(http, encoding):
    text = '{"prompt": "\u00e9\u4e2d"}'
    body = b"\xfe\xff" + text.encode(encoding) if encoding == "utf-16-be" else text.encode(encoding)
    assert as_utf8(bytearray(body)) == text.encode()
    assert http.post("/tokenize", content=body).json() == http.post("/tokenize", content=text.encode()).json()


def test_bodies_that_are_not_unicode_are_refused(http):
    for body in (b"\xff\xfe{", b"\xff\xfe\x00\xd8", b'{"prompt": "\xe9"}', b"\xef\xbb\xbf\xef\xbb\xbf{}"):
        assert http.post("/tokenize", content=body).json()["error"]["code"] == "invalid_json", body


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_values_that_json_does_not_have_are_refused_in_fields_of_any_type(http, value):
    for field in ('"guided_json": {"const": %s}', '"no_such_field": %s', '"vllm_xargs": {"a": [%s]}'):
        answer = http.post("/v1/completions", content=('{"prompt": "a", ' + field % value + "}").encode())
        assert answer.json()["error"]["code"] == "invalid_json", field
    named = {"prompt": "a", "max_tokens": 1, "user": value}
    assert http.post("/v1/completions", json=named).status_code == 200


def test_integers_may_have_a_fraction_of_zero(http):
    fields = {"max_tokens": 2.0, "n": 1.0, "top_k": 40.0, "seed": 1e0, "stop_token_ids": [3.0], "logprobs": 1.0}
    whole = {name: [3] if name == "stop_token_ids" else int(value) for name, value in fields.items()}
    for prompt in ([5.0, 6], [[5.0], [6.0]]):
        ids = [[int(each) for each in entry] if isinstance(entry, list) else int(entry) for entry in prompt]
        found, wanted = (
            http.post("/v1/completions", json={"prompt": one, **more}).json()["choices"]
            for one, more in ((prompt, fields), (ids, whole))
        )
        assert found == wanted
    for value in (4.5, 1e400, 1e30, -0.5):
        body = json.dumps({"prompt": "a", "max_tokens": value}).replace("Infinity", "1e400")
        answer = http.post("/v1/completions", content=body.encode())
        assert answer.json()["error"]["code"] == "invalid_type", value


@pytest.mark.parametrize("route", [route for route in load_routes(ARGS) if route.request], ids=lambda route: route.path)
def test_every_integer_of_a_request_may_have_a_fraction_of_zero(route):
    """The only integers of a core schema are those of ``Integer``: a union of an integer and a whole number."""

    def check(node) -> None:
        if isinstance(node, dict):
            if node.get("type") == "union" and node.get("custom_error_type") == "int_type":
                return
            assert node.get("type") != "int", node
            node = [value for name, value in node.items() if name != "metadata"]
        if isinstance(node, (list, tuple)):
            for entry in node:
                check(entry)

    for model in route.request:
        check(model.__pydantic_core_schema__)
