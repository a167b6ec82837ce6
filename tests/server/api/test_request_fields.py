"""Request fields beyond OpenAI's, and the routes and options of the server they belong to."""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import pytest

PLAIN = {"model": "tinybooks", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def post(http, path="/v1/completions", **changes):
    answer = http.post(path, json=PLAIN | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http, status=400, **changes) -> dict:
    answer = http.post("/v1/completions", json=PLAIN | changes)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_best_of_returns_the_most_likely(http):
    wanted = {"temperature": 1.2, "seed": 5, "ignore_eos": True}
    every = post(http, n=6, **wanted)["choices"]
    ranked = sorted(every, key=lambda choice: -choice["cum_log_probs"])
    found = post(http, n=2, best_of=6, **wanted)
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == 16
    assert post(http, best_of=1, stream=False)["choices"]
    assert refused(http, best_of=1, n=2)["param"] == "best_of"
    assert refused(http, best_of=4, stream=True)["code"] == "unsupported_parameter"
    assert refused(http, best_of=32, prompt=["a"] * 5)["param"] == "best_of"


def test_every_sequence_of_best_of_is_counted(http, metrics_of, server):
    before = metrics_of(server.url)["vllm:generation_tokens_total"]
    post(http, n=1, best_of=5, temperature=1.0, ignore_eos=True)
    assert metrics_of(server.url)["vllm:generation_tokens_total"] - before == 5 * 8


def test_bad_words_are_not_generated(http):
    text = post(http, max_tokens=30)["choices"][0]["text"]
    word = next(word for word in text.split() if word.isalpha() and len(word) > 2)
    assert word not in post(http, max_tokens=30, bad_words=[word])["choices"][0]["text"].split()


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(http):
    ids = http.post("/tokenize", json={"prompt": PLAIN["prompt"]}).json()["tokens"]
    wanted = post(http, prompt=ids[-2:])
    found = post(http, truncate_prompt_tokens=2, echo=True)
    assert found["usage"]["prompt_tokens"] == 2
    end = http.post("/detokenize", json={"tokens": ids[-2:]}).json()["prompt"]
    assert found["choices"][0]["text"] == end + wanted["choices"][0]["text"]


def test_the_beginning_of_a_prompt_can_be_kept(http):
    ids = http.post("/tokenize", json={"prompt": PLAIN["prompt"]}).json()["tokens"]
    found = post(http, truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True)
    assert found["choices"][0]["prompt_token_ids"] == ids[:2]
    long = post(http, prompt="word " * 3000, truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True)
    assert (
        long["choices"][0]["prompt_token_ids"]
        == http.post("/tokenize", json={"prompt": "word word"}).json()["tokens"][:2]
    )
    assert refused(http, truncate_prompt_tokens=5, truncation_side="middle")["param"] == "truncation_side"


def test_truncating_to_more_than_the_context_is_refused(http):
    for prompt in ("Once", [5, 6]):
        failure = refused(http, prompt=prompt, truncate_prompt_tokens=1025)
        assert (failure["code"], failure["param"]) == ("value_out_of_range", "truncate_prompt_tokens")
    assert post(http, truncate_prompt_tokens=-1)["choices"]


def test_log_probabilities_of_given_tokens(http):
    wanted = post(http, logprobs=20, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    third = list(wanted["top_logprobs"][0])[3]
    ids = [int(third.removeprefix("token_id:")), 7]
    fields = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    found = post(http, logprobs=0, **fields)["choices"][0]["logprobs"]
    assert [set(each) for each in found["top_logprobs"]] == [{token, third, "token_id:7"} for token in found["tokens"]]
    assert found["top_logprobs"][0][third] == pytest.approx(wanted["top_logprobs"][0][third], abs=1e-5)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True, **fields}
    chat = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert all([each["token"] for each in one["top_logprobs"]][1:] == [third, "token_id:7"] for one in chat)
    assert refused(http, **fields)["param"] == "logprob_token_ids"
    assert refused(http, logprobs=1, logprob_token_ids=[10**6])["code"] == "invalid_token_id"
    assert refused(http, logprobs=1, logprob_token_ids=list(range(129)))["code"] == "value_out_of_range"
    nothing = refused(http, logprobs=1, logprob_token_ids=[5], echo=True, max_tokens=0)
    assert (nothing["code"], nothing["param"]) == ("unsupported_parameter", "logprob_token_ids")


def test_a_text_that_repeats_itself_ends(http):
    fields = {"allowed_token_ids": [41], "max_tokens": 30, "ignore_eos": True}
    detection = {"max_pattern_size": 3, "min_count": 4}
    choice = post(http, repetition_detection=detection, **fields, return_token_ids=True)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [41] * 4
    late = post(http, repetition_detection=detection, min_tokens=9, **fields)
    assert late["usage"]["completion_tokens"] == 9
    assert post(http, repetition_detection={"max_pattern_size": 0}, **fields)["choices"][0]["finish_reason"] == "length"
    assert refused(http, repetition_detection={"max_pattern_size": 3})["param"] == "repetition_detection.min_count"
    assert refused(http, repetition_detection={"pattern": 3})["param"] == "repetition_detection.pattern"


def test_cache_salts_separate_cached_pages(http):
    def cached(**changes) -> int:
        usage = post(http, prompt="The miller and the mill were old friends. " * 8, **changes)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="x") == 0 and cached(cache_salt="x") > 0
    assert cached() == 0 and cached() > 0 and cached(cache_salt="y") == 0
    assert refused(http, cache_salt="")["param"] == "cache_salt"
    assert refused(http, cache_salt=7)["code"] == "invalid_type"


def test_a_request_that_forbids_every_token_is_refused(http):
    failure = refused(http, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=3)
    assert failure["code"] == "nothing_left"
    assert post(http)["choices"]


def test_priority_needs_the_priority_policy(http, start_server):
    assert refused(http, priority=3)["param"] == "priority"
    assert post(http, priority=0)["choices"]
    with start_server(scheduling_policy="priority") as server, httpx.Client(base_url=server.url, timeout=60) as other:
        assert post(other, priority=3)["choices"] == post(http)["choices"]
        assert refused(other, priority=2**40)["param"] == "priority"


def test_load_reports_running_and_waiting_requests(http):
    load = http.get("/load").json()
    assert set(load) == {"server_load", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    assert load["num_requests_running"] == 0


def test_unknown_fields_of_messages_are_ignored(http):
    """LiteLLM sends back the messages it made of an answer."""
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Hello",
            "refusal": None,
            "annotations": [],
            "tool_calls": None,
            "function_call": None,
            "reasoning_content": None,
            "provider_specific_fields": {"refusal": None, "reasoning_content": "Hm."},
        },
        {"role": "user", "content": "Who is there?", "colour": 1},
    ]
    plain = [{name: message[name] for name in ("role", "content")} for message in messages]
    ids = [http.post("/tokenize", json={"messages": each}).json()["tokens"] for each in (messages, plain)]
    assert ids[0] == ids[1]
    body = {"messages": messages, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        {"mm_processor_kwargs": None},
        {"media_io_kwargs": None},
        {"kv_transfer_params": None},
        {"include_reasoning": True},
        {"extra_foo": None},
        {"reasoning_effort": None},
        {"reasoning_effort": "none"},
        {"vllm_xargs": {"anything": 1}},
        {"guided_decoding_backend": None},
        {"structural_tag": None},
    ],
    ids=str,
)
def test_fields_that_ask_for_nothing_are_accepted(http, field):
    post(http, **field)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body | field).status_code == 200


def test_ignored_fields_are_named_in_a_header_and_counted(http, metrics_of, server):
    before = metrics_of(server.url)["aiakq:ignored_request_fields_total"]
    options = {"include_usage": True, "no_such_option": 1}
    body = PLAIN | {"no_such_field": 1, "verbosity": "high", "user": "me", "num_ctx": 9}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["x-ignored-fields"] == "no_such_field, verbosity"
    assert answer.json()["choices"] == post(http)["choices"]
    streamed = http.post("/v1/completions", json=PLAIN | {"stream": True, "stream_options": options})
    assert streamed.headers["x-ignored-fields"] == "stream_options.no_such_option"
    for path, body in (
        ("/tokenize", {"prompt": "a", "no_such_field": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": "a", "no_such_field": 1}]}]}),
        ("/v1/responses", {"input": "a", "no_such_field": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "no_such_field": 1}),
    ):
        answer = http.post(path, json=body)
        name = "messages[].content[].no_such_field" if "chat" in path else "no_such_field"
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, name), path
    assert metrics_of(server.url)["aiakq:ignored_request_fields_total"] == before + 7
    assert "x-ignored-fields" not in http.post("/v1/completions", json=PLAIN).headers
    assert http.post("/v1/completions", json=PLAIN | {"temprature": 0}).status_code == 400


def test_misspelled_fields_can_be_ignored_with_a_warning(http, start_server):
    with start_server(unknown_fields="warn") as server, httpx.Client(base_url=server.url, timeout=60) as other:
        for _ in range(2):
            found = post(other, no_such_field=1, reasoning_effort="low", temprature=0)
        assert found["choices"] == post(http)["choices"]
        assert refused(other, tools=[{}])["code"] == "unsupported_parameter"
        for number in range(150):
            other.post("/detokenize", json={"tokens": [5], f"name\n{number}": 1})
        description = other.get("/openapi.json").json()
        schema = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is True and "enum" not in schema["properties"]["reasoning_effort"]
        lines = [event.message for event in server.events if "ignored in requests" in event.message]
    for name in ("no_such_field", "reasoning_effort", "temprature"):
        assert sum(f" {name} " in line for line in lines) <= 1
    assert " no_such_field " in lines[0] and len(lines) <= 100 and not any("\n" in line for line in lines)


def test_admin_routes_are_disabled_by_default(http):
    for path in ("/abort_requests", "/reset_prefix_cache"):
        assert http.post(path).status_code == 404


@pytest.fixture(scope="module")
def managed(start_server):
    """A server with what operators switch on."""
    options = {
        "enable_admin_routes": True,
        "root_path": "/models/a",
        "enable_log_requests": True,
        "max_log_len": 5,
        "response_role": "narrator",
        "enable_request_id_headers": True,
    }
    with start_server(**options) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield server, client


def test_request_ids_can_be_chosen_by_clients(http, managed):
    _, named = managed
    assert post(http, request_id="mine")["id"] == "cmpl-mine"
    for wrong in ("", "a b", "x" * 129, "a\n"):
        assert refused(http, request_id=wrong)["param"] == "request_id"
    ignored = http.post("/v1/completions", json=PLAIN, headers={"X-Request-Id": "mine"})
    assert ignored.headers["x-request-id"] != "mine"
    answer = named.post("/v1/completions", json=PLAIN | {"request_id": "field"}, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"] == "cmpl-mine"
    assert named.get("/version", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    for wrong in ("a b", "x" * 129, ""):
        assert named.get("/version", headers={"X-Request-Id": wrong}).headers["x-request-id"] != wrong


def test_two_requests_may_have_the_same_id_at_once(http):
    prompts = ["Once upon a time", "It was the best of times"]
    alone = [post(http, prompt=prompt, max_tokens=60)["choices"][0]["text"] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        calls = [threads.submit(post, http, prompt=each, max_tokens=60, request_id="same") for each in prompts * 3]
    assert [call.result()["choices"][0]["text"] for call in calls] == alone * 3


def test_the_operator_sets_what_responses_contain(start_server, http):
    options = {
        "enable_force_include_usage": True,
        "return_tokens_as_token_ids": True,
        "enable_prompt_tokens_details": False,
        "enable_per_request_metrics": True,
    }
    with start_server(**options) as server, httpx.Client(base_url=server.url, timeout=60) as other:
        check_responses(other, http)


def check_responses(other: httpx.Client, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    limits = {"max_tokens": 8, "min_tokens": 8, "stream": True}
    for path, body in (
        ("/v1/completions", PLAIN | limits),
        ("/v1/completions", PLAIN | limits | {"stream_options": {"include_usage": False}}),
        ("/v1/chat/completions", {"messages": messages, **limits}),
        ("/v1/chat/completions", {"messages": messages, **limits, "n": 2}),
    ):
        lines = other.post(path, json=body).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 8 * body.get("n", 1) and chunks[-1]["choices"] == [], path
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert ["metrics" in chunk for chunk in chunks] == [*[False] * (len(chunks) - 1), body.get("n", 1) == 1]
    timings = post(other)["metrics"]
    assert min(timings.values()) >= 0 and timings["tokens_per_second"] > 0 and "metrics" not in post(other, n=2)
    assert "metrics" not in post(http)
    found = post(other, logprobs=1)
    assert all(token.startswith("token_id:") for token in found["choices"][0]["logprobs"]["tokens"])
    assert found["usage"]["prompt_tokens_details"] is None
    asked = post(other, logprobs=1, return_tokens_as_token_ids=False)["choices"][0]["logprobs"]["tokens"]
    assert asked == post(http, logprobs=1)["choices"][0]["logprobs"]["tokens"]


def test_responses_report_the_load_on_request(http):
    for format, start in (("TEXT", "TEXT named_metrics.kv_cache_usage_perc="), ("json", 'JSON {"named_metrics": {')):
        for body in (PLAIN, PLAIN | {"stream": True}):
            answer = http.post("/v1/completions", json=body, headers={"endpoint-load-metrics-format": format})
            assert answer.headers["endpoint-load-metrics"].startswith(start)
    for format in ("", "BIN", "a\tb"):
        answer = http.post("/v1/completions", json=PLAIN, headers={"endpoint-load-metrics-format": format})
        assert answer.status_code == 200 and "endpoint-load-metrics" not in answer.headers


def test_a_request_may_have_128_sequences(http):
    for path, body in (
        ("/v1/completions", {"prompt": "Once", "max_tokens": 1, "n": 128}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 1, "n": 2, "best_of": 128}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "n": 128}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == body["n"], answer.text
    failure = refused(http, n=129)
    assert (failure["code"], failure["param"]) == ("value_out_of_range", "n")


def test_reset_prefix_cache_empties_the_cache(managed):
    _, http = managed
    prompt = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen."

    def cached() -> int:
        return post(http, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0 < cached()


def test_abort_requests_ends_streams_with_an_error(managed):
    _, http = managed
    endless = PLAIN | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=endless) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        request_id = first.split('"id":"')[1].split('"')[0]
        assert http.post("/abort_requests", json={"request_ids": ["cmpl-other"]}).json() == {"aborted": 0}
        assert http.post("/abort_requests", json={"request_ids": [request_id]}).json() == {"aborted": 1}
        rest = list(lines)
    assert not any("[DONE]" in line for line in rest) and any('"aborted"' in line for line in rest)
    assert http.post("/abort_requests").json() == {"aborted": 0}
    assert http.post("/abort_requests", json={"ids": []}).status_code == 400


def test_requests_are_logged_up_to_the_maximum_length(managed):
    server, http = managed
    found = post(http, prompt="Secret garden", top_k=3)
    post(http, prompt=[40, 50, 60, 70, 80, 90])
    lines = [event.message for event in server.events if event.kind == "log" and "request cmpl-" in event.message]
    mine = next(line for line in lines if found["id"] in line)
    assert "'Secre'" in mine and "Secret" not in mine and "'top_k': 3" in mine
    assert any("[40, 50, 60, 70, 80]" in line for line in lines)


def test_requests_are_not_logged_by_default(http, server):
    post(http, prompt="Secret garden")
    assert not any("Secret" in event.message for event in server.events)


def test_root_path_prefixes_every_route(managed):
    _, http = managed
    assert http.get("/models/a/v1/models").status_code == http.get("/v1/models").status_code == 200
    assert http.get("/openapi.json").json()["servers"] == [{"url": "/models/a"}]


def test_the_response_role_can_be_configured(managed):
    _, http = managed
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["role"] == "narrator"


def test_without_a_tokenizer_responses_have_token_ids(start_server, http):
    ids = [40, 50, 60]
    wanted = post(http, prompt=ids, return_token_ids=True)["choices"][0]
    with (
        start_server(skip_tokenizer_init=True) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as other,
    ):
        found = post(other, prompt=ids, logprobs=1)
        choice = found["choices"][0]
        assert choice["token_ids"] == wanted["token_ids"] and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in wanted["token_ids"]]
        assert choice["sentence_length"] == 0 and choice["cum_log_probs"] == wanted["cum_log_probs"]
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/tokenize", {"prompt": "text"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            answer = other.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_tokenizer"), path
        # How many prompts there are is looked at before any of them costs anything.
        answer = other.post("/v1/completions", json={"prompt": ["text"] * 33})
        assert answer.json()["error"]["code"] == "too_many_prompts"


def test_a_unix_socket_instead_of_a_port(start_server, tmp_path, http):
    path = tmp_path / "aiakq.sock"
    with start_server(uds=str(path), max_connections_per_address=1) as server:
        assert server.url == f"unix:{path}" and server.ready.curl.startswith(f"curl --unix-socket {path} http://")
        clients = [
            httpx.Client(base_url=f"http://{host}", transport=httpx.HTTPTransport(uds=str(path)), timeout=60)
            for host in ("localhost", "aiakq.sock")
        ]
        for client in clients:
            assert post(client)["choices"] == post(http)["choices"]
        for client in clients:
            client.close()
        assert server.stop() == 0
    assert not path.exists()


def test_a_slash_at_the_end_of_a_path_does_not_matter(http, managed):
    for path in ("/v1/completions/", "/v1/models/", "/v1/models/tinybooks/", "/health/"):
        answer = http.post(path, json=PLAIN) if "completions" in path else http.get(path)
        assert answer.status_code == 200, path
    assert managed[1].get("/models/a/v1/models/").status_code == 200
    assert http.get("/nothing/").json()["error"]["code"] == "not_found"
    assert http.get("/v1/models//").status_code == 404


def test_the_tokenizer_can_be_described(http, start_server, example_model):
    assert http.get("/tokenizer_info").status_code == 404 and http.get("/docs").status_code == 200
    options = {"enable_tokenizer_info_endpoint": True, "disable_fastapi_docs": True, "chat_template": "{{ messages }}"}
    with start_server(**options) as server, httpx.Client(base_url=server.url, timeout=60) as other:
        found = other.get("/tokenizer_info").json()
        assert found["tokenizer_class"] and found["chat_template"] == "{{ messages }}"
        assert found["eos_token"] == "<|endoftext|>" and found["model_max_length"] == 1024
        assert found["added_tokens_decoder"]["0"] == {"content": "<|endoftext|>", "special": True}
        assert str(example_model) not in other.get("/tokenizer_info").text
        assert [other.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]
