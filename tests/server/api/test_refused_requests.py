"""Every kind of invalid request is refused with its status, code and parameter."""

from __future__ import annotations

import json

import pytest

COMPLETION = {"model": "tinybooks", "prompt": "Once", "max_tokens": 2}
CHAT = {"model": "tinybooks", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def check(answer, status: int, code: str, param: str | None) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    failure = answer.json()["error"]
    assert set(failure) == {"message", "type", "param", "code"}
    assert (failure["code"], failure["param"]) == (code, param), failure["message"]
    assert failure["message"] and "Traceback" not in failure["message"] and "pydantic" not in failure["message"]
    assert "x-request-id" in answer.headers


COMPLETIONS = [
    ({"model": "gpt-4"}, 404, "unknown_model", "model"),
    ({"model": "../../etc/passwd"}, 404, "unknown_model", "model"),
    ({"model": 5}, 400, "invalid_type", "model"),
    ({"prompt": 5}, 400, "invalid_type", "prompt"),
    ({"prompt": None}, 400, "invalid_type", "prompt"),
    ({"prompt": {"a": 1}}, 400, "invalid_type", "prompt"),
    ({"prompt": []}, 400, "empty_prompt", "prompt"),
    ({"prompt": ""}, 400, "empty_prompt", "prompt"),
    ({"prompt": [[]]}, 400, "empty_prompt", "prompt"),
    ({"prompt": ["a", 1]}, 400, "invalid_type", "prompt"),
    ({"prompt": [1, "a"]}, 400, "invalid_type", "prompt"),
    ({"prompt": [True]}, 400, "invalid_type", "prompt"),
    ({"prompt": [[1.5]]}, 400, "invalid_type", "prompt"),
    ({"prompt": [-1]}, 400, "invalid_token_id", "prompt"),
    ({"prompt": [4096]}, 400, "invalid_token_id", "prompt"),
    ({"prompt": [2**70]}, 400, "invalid_token_id", "prompt"),
    ({"prompt": ["a"] * 33}, 400, "too_many_prompts", "prompt"),
    ({"prompt": ["a"] * 5, "n": 32}, 400, "too_many_prompts", "n"),
    ({"prompt": [1] * 1024}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": "word " * 3000}, 400, "context_length_exceeded", "prompt"),
    ({"max_tokens": 1024}, 400, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": -1}, 400, "value_out_of_range", "max_tokens"),
    ({"max_tokens": 2**63}, 400, "value_out_of_range", "max_tokens"),
    ({"max_tokens": 1.5}, 400, "invalid_type", "max_tokens"),
    ({"max_tokens": "1"}, 400, "invalid_type", "max_tokens"),
    ({"max_tokens": True}, 400, "invalid_type", "max_tokens"),
    ({"min_tokens": 3}, 400, "value_out_of_range", "min_tokens"),
    ({"n": 0}, 400, "value_out_of_range", "n"),
    ({"n": 129}, 400, "value_out_of_range", "n"),
    ({"best_of": 2, "n": 3}, 400, "value_out_of_range", "best_of"),
    ({"best_of": 129}, 400, "value_out_of_range", "best_of"),
    ({"best_of": 10**9}, 400, "value_out_of_range", "best_of"),
    ({"best_of": 2, "stream": True}, 400, "unsupported_parameter", "best_of"),
    ({"bad_words": ["a"] * 129}, 400, "value_out_of_range", "bad_words"),
    ({"bad_words": [" "]}, 400, "value_out_of_range", "bad_words"),
    ({"bad_words": "a"}, 400, "invalid_type", "bad_words"),
    ({"truncate_prompt_tokens": 0}, 400, "value_out_of_range", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "1"}, 400, "invalid_type", "truncate_prompt_tokens"),
    ({"priority": 1}, 400, "unsupported_parameter", "priority"),
    ({"priority": 2**40}, 400, "value_out_of_range", "priority"),
    ({"priority": True}, 400, "invalid_type", "priority"),
    ({"logits_processors": ["os.system"]}, 400, "unsupported_parameter", "logits_processors"),
    ({"temperature": -0.1}, 400, "value_out_of_range", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
    ({"temperature": float("nan")}, 400, "value_out_of_range", "temperature"),
    ({"temperature": float("inf")}, 400, "value_out_of_range", "temperature"),
    ({"top_p": 0}, 400, "value_out_of_range", "top_p"),
    ({"top_p": 1.01}, 400, "value_out_of_range", "top_p"),
    ({"top_k": -2}, 400, "value_out_of_range", "top_k"),
    ({"min_p": 2}, 400, "value_out_of_range", "min_p"),
    ({"presence_penalty": 2.5}, 400, "value_out_of_range", "presence_penalty"),
    ({"repetition_penalty": 0}, 400, "value_out_of_range", "repetition_penalty"),
    ({"seed": 2**64}, 400, "value_out_of_range", "seed"),
    ({"stop": ""}, 400, "value_out_of_range", "stop"),
    ({"stop": ["a"] * 17}, 400, "value_out_of_range", "stop"),
    ({"stop": 5}, 400, "invalid_type", "stop"),
    ({"stop": ["a", None]}, 400, "invalid_type", "stop"),
    ({"stop_token_ids": [4096]}, 400, "invalid_token_id", "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, 400, "invalid_type", "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(129))}, 400, "value_out_of_range", "stop_token_ids"),
    ({"logit_bias": {"-1": 1}}, 400, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"abc": 1}}, 400, "invalid_type", "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "value_out_of_range", "logit_bias"),
    ({"logit_bias": {"5": True}}, 400, "invalid_type", "logit_bias.5"),
    ({"logit_bias": "5"}, 400, "invalid_type", "logit_bias"),
    ({"logit_bias": [[-1, False]]}, 400, "invalid_token_id", "logit_bias"),
    ({"logit_bias": [[" the", -1]]}, 400, "invalid_type", "logit_bias"),
    ({"logit_bias": [[5, 1, 2]]}, 400, "invalid_type", "logit_bias"),
    ({"logit_bias": [{"id": 5, "bias": True}]}, 400, "invalid_type", "logit_bias"),
    ({"logit_bias": [[i, 1] for i in range(1025)]}, 400, "value_out_of_range", "logit_bias"),
    ({"allowed_token_ids": []}, 400, "value_out_of_range", "allowed_token_ids"),
    ({"logprobs": 21}, 400, "value_out_of_range", "logprobs"),
    ({"logprobs": -1}, 400, "value_out_of_range", "logprobs"),
    ({"logprobs": True}, 400, "invalid_type", "logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "unsupported_parameter", "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "unsupported_parameter", "stream_options"),
    ({"stream": True, "stream_options": {"includeUsage": 1}}, 400, "unknown_field", "stream_options.includeUsage"),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"suffix": "end"}, 400, "unsupported_parameter", "suffix"),
    ({"guided_json": {"not": {}}}, 400, "grammar_not_enforceable", "guided_json"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_type", "response_format.type"),
    ({"use_beam_search": True}, 400, "unsupported_parameter", "use_beam_search"),
    ({"temprature": 0}, 400, "unknown_field", "temprature"),
]

CHATS = [
    ({"messages": []}, 400, "value_out_of_range", "messages"),
    ({"messages": "Hi"}, 400, "invalid_type", "messages"),
    ({"messages": [{"content": "Hi"}]}, 400, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        400,
        "missing_field",
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "context_length_exceeded", "messages"),
    ({"tools": [{"type": "function"}]}, 400, "missing_field", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, 400, "missing_field", "tools"),
    ({"chat_template": "{{ x }}"}, 400, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, 400, "unsupported_parameter", "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"documents": "a"}}, 400, "invalid_type", "chat_template_kwargs.documents"),
    ({"chat_template_kwargs": {"tools": []}}, 400, "unsupported_parameter", "chat_template_kwargs.tools"),
    ({"documents": ["a"]}, 400, "invalid_type", "documents[0]"),
    ({"documents": [{"text": "a"}]}, 400, "template_loses", "documents"),
    ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
    ({"tools": [{"type": "web_search_preview"}]}, 400, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "unsupported_parameter", "tools[0].type"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, 400, "invalid_type", "messages[0].name"),
    ({"top_logprobs": 2}, 400, "unsupported_parameter", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "value_out_of_range", "top_logprobs"),
    ({"logprobs": 2}, 400, "invalid_type", "logprobs"),
    ({"max_completion_tokens": 4096}, 400, "context_length_exceeded", "max_completion_tokens"),
    ({"top_logprobs": -2, "logprobs": True}, 400, "value_out_of_range", "top_logprobs"),
]


@pytest.mark.parametrize(("change", "status", "code", "param"), COMPLETIONS, ids=lambda value: repr(value)[:40])
def test_invalid_completion_requests_are_refused(http, change, status, code, param):
    check(http.post("/v1/completions", content=json.dumps(COMPLETION | change)), status, code, param)


@pytest.mark.parametrize(("change", "status", "code", "param"), CHATS, ids=lambda value: repr(value)[:40])
def test_invalid_chat_requests_are_refused(http, change, status, code, param):
    check(http.post("/v1/chat/completions", content=json.dumps(CHAT | change)), status, code, param)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        '{"prompt": "a"}'.encode("utf-16-le"),
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: repr(body)[:24],
)
def test_bodies_that_are_no_json_objects_are_refused(http, route, body):
    answer = http.post(route, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_type", "missing_field", "invalid_token_id")


def test_missing_fields_are_named(http):
    check(http.post("/v1/completions", json={}), 400, "missing_field", "prompt")
    check(http.post("/v1/chat/completions", json={}), 400, "missing_field", "messages")
    check(http.post("/tokenize", json={}), 400, "missing_field", "prompt")
    check(http.post("/detokenize", json={}), 400, "missing_field", "tokens")
    check(http.post("/detokenize", json={"tokens": [99999]}), 400, "invalid_token_id", "tokens")


def test_too_large_bodies_are_refused(http):
    check(http.post("/v1/completions", content=b"x" * ((4 << 20) + 1)), 413, "request_too_large", None)

    def pieces():
        for _ in range(65):
            yield b" " * (1 << 16)

    check(http.post("/v1/completions", content=pieces()), 413, "request_too_large", None)


@pytest.mark.parametrize("path", ["/v1", "/v2/completions", "/health//", "//v1/models", "/v1/completions//"])
def test_unknown_paths_are_not_found(http, path):
    check(http.get(httpx_url(http, path)), 404, "not_found", None)


def httpx_url(http, path: str) -> str:
    return str(http.base_url).rstrip("/") + path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/completions"),
        ("PUT", "/v1/chat/completions"),
        ("POST", "/health"),
        ("DELETE", "/v1/models/tinybooks"),
    ],
)
def test_wrong_methods_are_refused(http, method, path):
    answer = http.request(method, path)
    check(answer, 405, "method_not_allowed", None)
    assert "allow" in answer.headers


def test_every_method_on_every_route_gets_a_wellformed_response(http):
    """Each is answered or refused in the shape of its API; none is an error of the server."""
    routes = http.get("/openapi.json").json()["paths"]
    for path in [*(path.replace("{name}", "tinybooks") for path in routes), "/docs", "/nowhere", "/v1/models/"]:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
            answer = http.request(method, path)
            assert answer.status_code in (200, 400, 404, 405), (method, path, answer.status_code)
            if answer.status_code >= 400 and method != "HEAD":
                shape = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == shape


def test_the_server_still_responds_afterwards(http):
    """Runs last in this file: after all of the above an ordinary request is answered."""
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_a_model_of_text_does_not_transcribe(http, path):
    answer = http.post(path, files={"file": ("speech.wav", b"RIFF")})
    refusal = answer.json()["error"]
    assert (answer.status_code, refusal["code"]) == (400, "task_mismatch") and "transcribe audio" in refusal["message"]
