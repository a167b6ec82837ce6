"""Request fields beyond OpenAI's, and the routes and options of the server they belong to."""

from __future__ import annotations

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
    assert refused(http, best_of=16, prompt=["a"] * 5)["param"] == "best_of"


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
    }
    with start_server(**options) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield server, client


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
