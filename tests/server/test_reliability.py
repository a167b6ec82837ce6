"""Requests known to crash or slow down inference servers: each is refused or harmless, and a concurrent stream is
unaffected.
"""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CANARY = {"prompt": "It was the best of times", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def expected(server) -> str:
    """The text of the canary request while nothing else runs."""
    return httpx.post(server.url + COMPLETIONS, json=CANARY, timeout=60).json()["choices"][0]["text"]


@pytest.fixture
def post(server, expected, metrics_of) -> Iterator[Post]:
    """``post(path, body)`` -> the response. A concurrent stream must not change; all pages must be freed at the end."""
    answers: list[str] = []
    ended = threading.Event()

    def stream() -> None:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            while not answers or not ended.is_set():
                with client.stream("POST", COMPLETIONS, json={**CANARY, "stream": True}) as answer:
                    lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
                assert lines.pop() == "[DONE]"
                answers.append("".join(json.loads(line)["choices"][0]["text"] for line in lines))

    canary = threading.Thread(target=stream)
    canary.start()
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:

        def send(path: str, body: object) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return client.post(path, content=content, headers={"content-type": "application/json"})

        yield send
        ended.set()
        canary.join()
        assert set(answers) == {expected}
        assert client.get("/health").status_code == 200
    deadline = time.monotonic() + 30
    while metrics_of(server.url)["vllm:kv_cache_usage_perc"]:
        assert time.monotonic() < deadline, "a page is not freed"
        time.sleep(0.05)


def check_refused(answer: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text[:500]
    failure = answer.json()["error"]
    assert failure["code"] == code and (param is None or failure["param"] == param)


def test_a_list_of_more_than_32_prompts_is_refused(post):
    for prompts in (["a"] * 33, [[5]] * 33, ["a"] * 99_000):
        check_refused(post(COMPLETIONS, {"prompt": prompts}), 400, "too_many_prompts", "prompt")
    assert post(COMPLETIONS, {"prompt": ["a"] * 1_000_000, "max_tokens": 1}).status_code in (400, 413)
    assert len(post(COMPLETIONS, {"prompt": ["a"] * 32, "max_tokens": 1}).json()["choices"]) == 32


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": -1}, "value_out_of_range", "max_tokens"),
        ({"max_tokens": 2**63}, None, "max_tokens"),
        ({"max_tokens": 10**400}, None, "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": 2000}, "context_length_exceeded", "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "value_out_of_range", "min_tokens"),
        ({"min_tokens": -1}, "value_out_of_range", "min_tokens"),
    ],
)
def test_invalid_token_limits_are_refused(post, fields, code, param):
    answer = post(COMPLETIONS, {"prompt": "Once", **fields})
    check_refused(answer, 400, code or answer.json()["error"]["code"], param)
    assert len(answer.content) < 1000, "the message repeats the whole value"


def test_max_tokens_of_zero_echoes_the_prompt(post):
    answer = post(COMPLETIONS, {"prompt": "Once", "max_tokens": 0, "echo": True})
    assert answer.json()["choices"][0]["text"] == "Once" and answer.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", [[-1], [4096], [2**40], [2**70], [True], [1.5], ["a", [5]], [[5], "a"], [[[5]]]])
def test_invalid_token_ids_are_refused(post, prompt):
    answer = post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt", answer.text


@pytest.mark.parametrize("prompt", [[], [[]], [[5], []]])
def test_empty_prompts_are_refused(post, prompt):
    answer = post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt", answer.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"prompt": "a", "\\udc00\\ud800": 1}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xc0\xaf"}',
        json.dumps({"prompt": "a"}).encode("utf-16-le"),
        json.dumps({"prompt": "a"}).encode("utf-32"),
    ],
    ids=["surrogate", "reversed surrogates", "invalid", "overlong", "utf-16 without a byte order mark", "utf-32"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_bodies_that_are_not_utf_8_are_refused(post, path, body):
    answer = post(path, body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_lone_surrogate_is_replaced(post, path):
    answer = post(
        path,
        b'{"prompt": "cut \\ud800", "return_token_ids": true, "max_tokens": 1}'
        if path == COMPLETIONS
        else b'{"prompt": "cut \\ud800"}',
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    ids = found["choices"][0]["prompt_token_ids"] if path == COMPLETIONS else found["tokens"]
    assert post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("cut \ufffd")


@pytest.mark.parametrize(
    "text",
    [
        "a\0b",
        "\u202eabc\u202c",
        "e" + "\u0301" * 5000,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\ufeff",
        "\ufffe\uffff",
    ],
    ids=["nul", "right to left", "combining marks", "zero width joiners", "byte order mark", "noncharacters"],
)
def test_unusual_characters_survive_tokenization_and_streaming(post, text):
    ids = post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert post("/detokenize", {"tokens": ids}).json()["prompt"] == text
    prompt = ids[:200]
    answer = post(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "temperature": 2.0, "seed": 1})
    assert answer.status_code == 200
    streamed = post(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "temperature": 2.0, "seed": 1, "stream": True})
    events = [line[6:] for line in streamed.content.decode().splitlines() if line.startswith("data: ")][:-1]
    joined = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert joined == answer.json()["choices"][0]["text"], "a character was split between two events"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"guided_regex": "(a+)+$"}, None),
        ({"guided_regex": "foo**"}, None),
        ({"guided_regex": "(?<=a)b"}, "grammar_not_enforceable"),
        ({"guided_grammar": "(" * 30_000}, "grammar_not_enforceable"),
        ({"guided_json": json.loads("[" * 40 + "]" * 40)}, "invalid_type"),
        ({"structured_outputs": {"regex": "(a+)+$"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$"}}}},
            None,
        ),
    ],
)
def test_patterns_of_exponential_cost_are_enforced_or_refused_within_seconds(post, fields, code):
    began = time.monotonic()
    answer = post(COMPLETIONS, {"prompt": "Once", "max_tokens": 1, **fields})
    if code is None:
        assert answer.status_code == 200
    else:
        check_refused(answer, 400, code)
    assert time.monotonic() - began < 5


def test_a_client_that_stops_reading_is_disconnected_and_its_pages_are_freed(start_server, metrics_of):
    """It is disconnected after --write-timeout; its unread output and its pages are freed."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}
    )
    with start_server(write_timeout=1.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        stalled.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        assert stalled.recv(1) == b"H"
        deadline = time.monotonic() + 120
        while metrics_of(server.url)["vllm:num_requests_running"] or metrics_of(server.url)["vllm:kv_cache_usage_perc"]:
            assert time.monotonic() < deadline, "the request still runs"
            time.sleep(0.1)
        while not metrics_of(server.url)["vllm:request_process_fail_total"]:
            assert time.monotonic() < deadline, "the request is not counted as failed"
            time.sleep(0.1)
        assert httpx.post(server.url + COMPLETIONS, json=CANARY, timeout=60).status_code == 200
        stalled.close()


@pytest.fixture
def listening_url() -> Iterator[tuple[str, list[object]]]:
    """A URL, and the connections that were made to it."""
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        ended = threading.Event()

        def accept() -> None:
            while not ended.is_set():
                try:
                    connections.append(listener.accept())
                except TimeoutError:
                    continue

        watcher = threading.Thread(target=accept)
        watcher.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/picture.png", connections
        ended.set()
        watcher.join()


def test_urls_in_messages_are_never_fetched(post, listening_url):
    url_of_listener, connections = listening_url
    for url in (url_of_listener, "file:///etc/hostname", "data:image/png;base64,AAAA", "http://169.254.169.254/latest"):
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_id": url}},
        ]
        for part in parts:
            answer = post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
            assert answer.status_code == 400, answer.text
            assert "hostname" not in answer.text or url in answer.text
    assert post(CHAT, {"messages": [{"role": "user", "content": url_of_listener}], "max_tokens": 1}).status_code == 200
    time.sleep(0.3)
    assert not connections


def test_api_keys_do_not_share_cached_prefixes(start_server):
    """Compare numbers of cached tokens; ``tests/runtime/engine/test_pages.py`` tests the hashes."""
    prompt = {"prompt": list(range(300, 500)), "max_tokens": 1}

    def cached(key: str, **fields: object) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(server.url + COMPLETIONS, json={**prompt, **fields}, headers=headers, timeout=60).json()
        return (answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]

    with start_server(api_key=["first", "second"]) as server:
        assert cached("first") == 0 and cached("first") > 100
        assert cached("second") == 0 and cached("second") > 100
        # A cache salt gives no access to the prefixes of another key.
        for salt in ("first", "second", " ", "x" * 1000):
            assert cached("second", cache_salt=salt) == 0
        # A page with one different token is not found.
        assert cached("first", prompt=[*range(300, 310), 7, *range(311, 500)]) == 0
        for salt in (7, "", ["first"], {"a": 1}):
            headers = {"authorization": "Bearer first"}
            answer = httpx.post(
                server.url + COMPLETIONS, json={**prompt, "cache_salt": salt}, headers=headers, timeout=60
            )
            assert answer.status_code == 400


def test_requests_cannot_add_metric_series(post, server, metrics_of):
    assert post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}).status_code == 200
    assert post(COMPLETIONS, {"prompt": "Once", "model": "none"}).status_code == 404
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        for number in range(300):
            assert client.get(f"/path{number}").status_code == 404
            assert client.request(f"METHOD{number}", "/v1/models").status_code in (400, 405, 501)
            body = {"prompt": "Once", "model": f"model{number}", "user": f"user{number}"}
            assert client.post(COMPLETIONS, json=body, headers={"x-request-id": f"id{number}"}).status_code == 404
            if number == 0:  # the first response of a route, method and status adds series
                before = set(metrics_of(server.url))
    assert set(metrics_of(server.url)) == before


def memory_of(pid: int) -> float:
    """Return the memory of a process and its children in MB."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 1e6


def test_overload_is_rejected_at_once_and_leaks_no_memory(start_server):
    """A request that finds the queue full is rejected at once; queued requests are served; neither leaks memory."""
    with start_server(max_num_seqs=2, max_num_queued_reqs=4, num_gpu_blocks_override=257) as server:
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False, limits=httpx.Limits()) as client:
            expected = client.post(COMPLETIONS, json=CANARY).json()["choices"][0]["text"]

            def send(_: int) -> tuple[float, httpx.Response]:
                began = time.monotonic()
                answer = client.post(COMPLETIONS, json=CANARY)
                return time.monotonic() - began, answer

            memory = []
            for _ in range(4):
                with ThreadPoolExecutor(60) as pool:
                    answers = list(pool.map(send, range(120)))
                memory.append(memory_of(server.process.pid))
                served = [answer for _, answer in answers if answer.status_code == 200]
                assert {answer.json()["choices"][0]["text"] for answer in served} == {expected}
                refused = [(seconds, answer) for seconds, answer in answers if answer.status_code != 200]
                assert len(served) >= 6 and len(refused) >= 20
                for _, answer in refused:
                    check_refused(answer, 503, "overloaded")
                    assert int(answer.headers["retry-after"]) > 0
                # The server responds within 0.1 s; here sixty client threads share the processor with it.
                assert sorted(seconds for seconds, _ in refused)[len(refused) // 2] < 2
                assert client.get("/health").status_code == 200
            assert memory[-1] - memory[0] < 32
            assert client.post(COMPLETIONS, json=CANARY).json()["choices"][0]["text"] == expected


#: Modules that read the wall clock: for timestamps, or to freeze it for chat templates.
WALL_CLOCK_USERS = {
    *("aiakq/records.py", "aiakq/quantizers/run_report.py", "aiakq/runtime/text/conversation_process.py"),
    *("aiakq/server/api/openai.py", "aiakq/server/api/service.py", "aiakq/server/api/responses/builder.py"),
    "aiakq/server/api/status.py",  # vllm:lora_requests_info has the time as its value
    "aiakq/server/api/pooling/pooled_results.py",
    *("aiakq/server/telemetry/request_records.py", "aiakq/terminal/json_log.py"),
}


def test_durations_use_the_monotonic_clock():
    """Durations, order and timeouts do not use the wall clock, which may be adjusted."""
    root = Path(__file__).resolve().parent.parent.parent
    names = {"datetime.datetime", "datetime.date"}
    names |= {f"time.{name}" for name in ("time", "time_ns", "ctime", "localtime", "gmtime", "strftime")}
    readers = set()
    for path in (*root.glob("aiakq/**/*.py"), *root.glob("kernels/**/*.py")):
        used = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
        if used & names:
            readers.add(path.relative_to(root).as_posix())
    assert readers == WALL_CLOCK_USERS
    for path in (root / "kernels/cpu/src").iterdir():
        assert not re.search(r"system_clock|CLOCK_REALTIME|gettimeofday|\btime\(", path.read_text(encoding="utf-8")), (
            path
        )


def test_a_server_with_few_file_descriptors_keeps_serving(example_model):
    """A server with 64 file descriptors accepts as many connections as fit, logs little, and serves active clients."""
    code = (
        "import resource, sys\n"
        "from aiakq.arguments.server import checked\n"
        "from aiakq.server.launch import serve\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "args = checked({'model': sys.argv[1], 'port': 0, 'num_gpu_blocks_override': 65}, server=True)\n"
        "sys.exit(serve(args, lambda event: print(event.kind, event.url, event.message, flush=True)))\n"
    )
    command = [sys.executable, "-P", "-c", code, str(example_model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        seen = []
        for line in process.stdout:
            seen.append(line.split(maxsplit=2))
            if seen[-1][0] == "ready":
                break
        assert any(kind == "warning" and "ulimit -n" in text for kind, *_, text in seen)
        with httpx.Client(base_url=seen[-1][1], timeout=60, trust_env=False) as client:
            host, port = client.base_url.host, client.base_url.port

            def send(body: dict) -> int:
                try:
                    # One connection per request.
                    return client.post(COMPLETIONS, json=body, headers={"connection": "close"}).status_code
                except httpx.TransportError:  # disconnected while connecting
                    return 503

            assert send({"prompt": "Once", "max_tokens": 2}) == 200
            idle = [socket.create_connection((host, port)) for _ in range(200)]
            assert send({"prompt": "Once", "max_tokens": 2}) == 200, "idle connections were not closed"
            with ThreadPoolExecutor(80) as pool:
                statuses = list(pool.map(send, [CANARY] * 160))
            assert set(statuses) <= {200, 503} and statuses.count(200) > 10
            for connection in idle:
                connection.close()
            assert send({"prompt": "Once", "max_tokens": 2}) == 200
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert errors.count("\n") < 20, errors[-2000:]
    finally:
        process.kill()
        process.communicate()
