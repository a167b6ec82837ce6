"""Halves of characters in JSON bodies: mended in texts, refused in names, paths and keys."""

from __future__ import annotations

import json

import pytest

from aiakq.errors import AiakqError
from aiakq.server.http.json_surrogates import mended_json


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"prompt": "a\\ud83c"}', {"prompt": "a\ufffd"}),
        (b'{"prompt": ["\\udf89", "\\uD83C\\uDF89", 1.50, null]}', {"prompt": ["\ufffd", "\U0001f389", 1.5, None]}),
        (b'{"prompt": "\\\\ud83c \\ud83c\\\\"}', {"prompt": "\\ud83c \ufffd\\"}),
        (b'{"prompt": "\xed\xa0\xbc"}', {"prompt": "\ufffd"}),
        (b'{"stop": ["\\ud83c"], "tools": [{"function": {"description": "\\ud83c"}}]}', None),
        (b'{"messages": [{"content": [{"type": "tool_use", "name": "f", "input": {"name": "\\ud83c"}}]}]}', None),
        (b'{"documents": [{"name": "\\ud83c"}], "chat_template_kwargs": {"model": "\\ud83c"}}', None),
    ],
)
def test_texts_get_replacement_characters(body, expected):
    mended = mended_json(body)
    assert mended is not None and b"\\ud83c" not in mended.replace(b"\\\\ud83c", b"")
    assert json.loads(mended) == (expected or json.loads(body.replace(b"\\ud83c", b"\\ufffd")))


@pytest.mark.parametrize(
    "body", [b'{"prompt": "a"}', b'{"prompt": "\\ud83c"', b"\xff\xfe", b'{"prompt": "\\ud8', b"[" * 99999]
)
def test_other_bodies_are_left_to_the_parser(body):
    assert mended_json(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "a\\ud83c"}', "model"),
        (b'{"lora_path": "/\\udf89"}', "lora_path"),
        (b'{"a\\ud83c": 1}', "a\ufffd"),
        (b'{"logit_bias": {"1\\ud83c": 1}}', "logit_bias.1\ufffd"),
        (b'{"tools": [{"function": {"name": "\\ud83c"}}]}', "tools[0].function.name"),
        (
            b'{"tools": [{"function": {"parameters": {"properties": {"\\ud83c": {}}}}}]}',
            "tools[0].function.parameters.properties.\ufffd",
        ),
        (b'{"messages": [{"role": "\\ud83c", "content": "a"}]}', "messages[0].role"),
        (b'{"input": [{"type": "function_call", "name": "\\ud83c"}]}', "input[0].name"),
    ],
)
def test_names_paths_and_keys_are_refused(body, param):
    with pytest.raises(AiakqError) as caught:
        mended_json(body)
    assert (caught.value.id, caught.value.param) == ("invalid_type", param)
    str(caught.value).encode()
