"""The structure of JSON bodies: depth, number of keys, duplicate keys."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from aiakq.errors import AiakqError
from aiakq.server.api.chat import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.tokenization import DetokenizeRequest
from aiakq.server.http.body import MAX_DEPTH, MAX_KEYS, check_structure

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
    """Complaining about each would take the server many seconds, for everybody."""
    for model, name in (
        (CompletionRequest, "stop_token_ids"),
        (ChatCompletionRequest, "messages"),
        (DetokenizeRequest, "tokens"),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(b'{"%b": [' % name.encode() + b'"a",' * (1 << 19) + b'"a"], "prompt": "a"}')
        assert len(caught.value.errors()) <= 2, name
