"""Structured output over HTTP: every field of both generations, streams, several choices, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PROMPT = {"model": "tinybooks", "prompt": "Once upon a time", "max_tokens": 200, "seed": 7}
CHAT = {"model": "tinybooks", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200, "seed": 7}


def text_of(http, **fields) -> str:
    answer = http.post("/v1/completions", json={**PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    return answer.json()["choices"][0]["text"]


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": JSON_FORMAT},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
    ids=["guided_json", "as text", "structured_outputs", "response_format", "not strict"],
)
def test_a_schema_is_enforced_by_every_field_alike(http, fields):
    text = text_of(http, **fields)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == text_of(http, guided_json=SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"regex": "^[0-9]{3}$"}}, "[0-9]{3}"),
        ({"guided_choice": ['say "no"\\', "ma\nybe"]}, r'say "no"\\|ma\nybe'),
        ({"structured_outputs": {"choice": ["ünï", "😀😀"]}}, "ünï|😀😀"),
        ({"guided_grammar": 'root ::= "a" [0-9] ("x" | "y")'}, "a[0-9][xy]"),
        ({"structured_outputs": {"grammar": 'start: "q" /[a-f]{2,4}/'}}, "q[a-f]{2,4}"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"name":".*","age":\d+,.*\}'),
        ({"guided_json": {"type": "array", "maxItems": 0}, "guided_whitespace_pattern": "~"}, r"\[~?\]"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "hi"}}}}, "hi"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a/b{2}"}}},
            "a/bb",
        ),
    ],
)
def test_texts_match(http, fields, pattern):
    text = text_of(http, **fields)
    assert re.fullmatch(pattern, text, re.DOTALL), text


def test_json_objects(http):
    answer = http.post("/v1/completions", json={**PROMPT, "response_format": {"type": "json_object"}}).json()
    choice = answer["choices"][0]
    assert choice["text"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)


def test_the_openai_client_gets_json_whole_and_streamed(client):
    whole = client.chat.completions.create(**CHAT, response_format=JSON_FORMAT)
    jsonschema.validate(json.loads(whole.choices[0].message.content), SCHEMA)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**CHAT, response_format=JSON_FORMAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_choices_of_one_request_do_not_share_their_state(client):
    together = client.completions.create(**PROMPT, n=4, extra_body={"guided_json": SCHEMA})
    texts = [choice.text for choice in together.choices]
    assert len(set(texts)) > 1
    for index, text in enumerate(texts):
        jsonschema.validate(json.loads(text), SCHEMA)
        alone = client.completions.create(**{**PROMPT, "seed": 7 + index}, extra_body={"guided_json": SCHEMA})
        assert alone.choices[0].text == text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "not"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"structured_outputs": {"json": {"$ref": "#/foo"}}}, "structured_outputs", "#/foo"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json", "not"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": 3}, "guided_json", "schema"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "regex"),
        ({"guided_regex": ""}, "guided_regex", "allowed"),
        ({"guided_choice": []}, "guided_choice", "strings"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "given too"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "known"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex is given too"),
        ({"guided_regex": "a", "guided_decoding_backend": "magic"}, "guided_decoding_backend", "xgrammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "text", "jsonschema": 1}}, "response_format.jsonschema", "known"),
        ({"structural_tag": {"format": {"type": "magic"}}}, "structural_tag", "magic"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<b"]}}, "structural_tag", "trigger"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(http, fields, param, words):
    answer = http.post("/v1/completions", json={**PROMPT, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def deep_schema(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


#: Grammars that ask for much work, and whether they are refused; the others are answered.
HOSTILE = [
    ({"guided_json": deep_schema(70)}, True),
    ({"guided_json": {"properties": {f"p{number}": {} for number in range(2000)}}}, True),
    ({"guided_json": {"type": "array", "minItems": 10**9}}, None),
    ({"guided_json": {"enum": [f"value {number}" for number in range(8000)]}}, None),
    ({"guided_json": {"enum": [f"a value {number}" for number in range(90_000)]}}, True),
    ({"guided_choice": ["x" * 32 + str(number) for number in range(9000)]}, True),
    ({"guided_choice": [f"choice {number}" for number in range(50_000)]}, True),
    ({"guided_regex": "(a{1000}){1000}" * 4}, True),
    ({"guided_regex": "a{1000000000}"}, None),
    ({"guided_regex": "(a+)+b"}, False),
    ({"guided_regex": "(.*a){25}"}, False),
    ({"guided_regex": "(?=a)a"}, True),
    ({"guided_regex": "(a)\\1"}, True),
    ({"guided_grammar": "start: e\ne: e e | /[a-b]/"}, False),
]


def test_hostile_grammars_are_bounded_and_change_no_stream(http, server):
    """Each is refused or processed in bounded time, and a concurrent stream does not change."""

    def stream() -> str:
        body = {**PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False).text
        assert text.endswith("data: [DONE]\n\n")
        # How many tokens a chunk has depends on when the client reads.
        lines = [line[6:] for line in text.splitlines() if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    alone = stream()
    with ThreadPoolExecutor(2) as pool:
        for fields, is_refused in HOSTILE:
            concurrent = pool.submit(stream)
            answer = http.post("/v1/completions", json={**PROMPT, **fields, "max_tokens": 4}, timeout=60)
            assert answer.status_code in ((200, 400) if is_refused is None else (400,) if is_refused else (200,)), (
                str(fields)[:80] + answer.text[:200]
            )
            assert concurrent.result() == alone, str(fields)[:80]


def test_a_grammar_that_explodes_fails_alone(client, http):
    """``e: e e`` takes longer with every token."""
    with pytest.raises(openai.APIError) as caught:
        client.completions.create(
            **{**PROMPT, "max_tokens": 400},
            extra_body={"min_tokens": 400, "guided_grammar": "start: e\ne: e e | /[a-b]/"},
        )
    assert "too complex" in str(caught.value)
    assert http.post("/v1/completions", json={**PROMPT, "max_tokens": 1}).status_code == 200


@pytest.mark.process_failures
def test_a_restarted_engine_continues_under_the_same_grammar(start_server):
    body = {**PROMPT, "max_tokens": 900, "ignore_eos": True, "guided_regex": "[a-f ]{2000,}"}
    with start_server() as server, ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=90) as http:
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=90)
        while "vllm:num_requests_running{" not in (page := http.get("/metrics").text) or re.search(
            r"^vllm:num_requests_running\{[^}]*\} 0", page, re.MULTILINE
        ):
            time.sleep(0.01)
        os.kill([event.engine_pid for event in server.events if event.engine_pid is not None][-1], signal.SIGKILL)
        assert waiting.result().json()["choices"][0]["text"] == alone
        assert re.fullmatch("[a-f ]+", alone)


@pytest.mark.parametrize("kind", ["text", "json_schema"])
def test_a_schema_that_is_no_object_is_refused_whatever_the_format(http, kind):
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    wrong = {"type": kind, "schema": [1]}
    bodies = {
        "/v1/chat/completions": (
            message | {"response_format": {"type": kind, "json_schema": {"name": "a", "schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        "/v1/responses": ({"input": "Hi", "text": {"format": wrong}}, "text.format.schema"),
    }
    for path, (body, param) in bodies.items():
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("invalid_type", param)
    answer = http.post("/v1/messages", json=message | {"output_config": {"format": wrong | {"type": "json_schema"}}})
    assert answer.status_code == 400 and "output_config.format.schema" in answer.json()["error"]["message"]
