"""Start and shutdown, signals, disconnecting clients and dying processes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from aiakq.errors import AiakqError
from aiakq.server.background import RunningServer

LONG = {"prompt": "A very long story begins", "temperature": 0, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def victims(start_server) -> Iterator[Callable[[], RunningServer]]:
    """``victims()`` -> a server that the test may end; four are started at once, which is quicker."""
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(start_server) for _ in range(4)]
        waiting = [one.result() for one in started]
    yield waiting.pop
    for server in waiting:
        server.stop()


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def exists(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Stream(threading.Thread):
    """A streaming client in the background; ``events`` is what came so far."""

    def __init__(self, url: str, **changes) -> None:
        super().__init__()
        self.url, self.body, self.events = url, LONG | {"stream": True} | changes, []
        self.start()
        wait_until(lambda: len(self.events) > 3)

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # the server was killed
            httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=60, trust_env=False) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])

    @property
    def failure(self) -> dict | None:
        return json.loads(self.events[-1]).get("error") if self.events[-1] != "[DONE]" else None


@pytest.mark.parametrize("changes", [{"stream": True}, {}, {"n": 4}, {"stream": True, "n": 4}], ids=str)
def test_a_disconnecting_client_aborts_its_request(server, metrics_of, changes):
    before = metrics_of(server.url)
    body = json.dumps(LONG | changes).encode()
    host, port = re.fullmatch(r"http://(.+):(\d+)", server.url).groups()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: metrics_of(server.url)["vllm:num_requests_running"] == changes.get("n", 1))
    wait_until(lambda: metrics_of(server.url)["vllm:num_requests_running"] == 0, 2.0)
    after = metrics_of(server.url)
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 600
    aborted = "vllm:request_success_total{finished_reason=abort}"
    assert after[aborted] - before[aborted] == 1
    assert after["vllm:request_process_fail_total"] - before["vllm:request_process_fail_total"] == 1


def test_disconnecting_before_the_body_is_sent(server, metrics_of):
    host, port = re.fullmatch(r"http://(.+):(\d+)", server.url).groups()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(0.1)
    aborted = "vllm:request_success_total{finished_reason=abort}"
    wait_until(lambda: metrics_of(server.url)[aborted] > 0)
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_disconnecting_at_any_moment_leaves_no_trace(server, metrics_of, reset):
    """Cut in the head, in the body, in the queue, in prefill, between tokens and near the end."""
    host, port = re.fullmatch(r"http://(.+):(\d+)", server.url).groups()
    for changes in ({}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}):
        body = json.dumps(LONG | {"max_tokens": 60} | changes).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        request = head + body
        moments = [(10, 0.0), (len(head), 0.0), (len(head) + 5, 0.0), (len(head) + 5, 0.02)]
        moments += [(len(request), delay) for delay in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)]
        for sent, delay in moments:
            with socket.create_connection((host, int(port))) as connection:
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(request[:sent])
                time.sleep(delay)

    def is_as_before() -> bool:
        now = metrics_of(server.url)
        ended = now["vllm:request_process_success_total"] + now["vllm:request_process_fail_total"]
        idle = now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == now["vllm:kv_cache_usage_perc"]
        return idle and now["vllm:num_requests_running"] == 0 and now["vllm:request_total"] == ended

    wait_until(is_as_before, 5.0)


def test_term_finishes_running_requests(victims):
    server = victims()
    stream = Stream(server.url)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any(event.kind == "draining" for event in server.events))
    answers = [
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, trust_env=False),
        httpx.get(f"{server.url}/health", trust_env=False),
    ]
    for answer in answers:
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert int(answer.headers["retry-after"]) > 0
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(10) == 0
    assert not exists(server.ready.engine_pid)


def test_a_second_term_interrupts_the_drain(victims, metrics_of):
    server = victims()
    stream = Stream(server.url)
    waiting = ThreadPoolExecutor().submit(
        httpx.post, f"{server.url}/v1/completions", json=LONG | {"n": 8}, timeout=60, trust_env=False
    )
    wait_until(lambda: metrics_of(server.url)["vllm:num_requests_running"] >= 8)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any(event.kind == "draining" for event in server.events))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 143
    stream.join()
    assert stream.failure["code"] == "shutting_down"
    assert waiting.result().status_code == 503
    assert not exists(server.ready.engine_pid)


def test_interrupt_with_little_time_cuts_what_runs(start_server, metrics_of):
    """After --shutdown-timeout every client has an error, every process has ended, and the exit is an orderly one."""
    with start_server(shutdown_timeout=0.2, max_num_seqs=2) as server:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert len(processes) > 2
        stream = Stream(server.url, n=16)
        with ThreadPoolExecutor() as pool:
            body = LONG | {"n": 8}
            waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
            wait_until(lambda: metrics_of(server.url)["vllm:num_requests_waiting"] >= 8)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(20) == 0
            stream.join()
        assert stream.failure["code"] == "shutting_down"
        answer = waiting.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert not psutil.wait_procs(processes, timeout=10)[1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", trust_env=False)


def test_the_engine_does_not_outlive_its_server(victims):
    server = victims()
    stream = Stream(server.url)
    server.process.kill()
    wait_until(lambda: not exists(server.ready.engine_pid))
    stream.join()
    assert stream.events[-1] != "[DONE]"


def test_a_background_server_does_not_outlive_its_starter(victims):
    server = victims()
    stream = Stream(server.url, n=16)  # one response would be complete before the timeout of the server
    server._channel.hang_up()  # what the death of the starting process does
    assert server.process.wait(10) == 143
    stream.join()
    assert stream.failure["code"] == "shutting_down"


def test_a_port_in_use_is_found_before_loading(server, start_server):
    began = time.monotonic()
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(AiakqError, match="--port") as caught:
        start_server(port=port)
    assert caught.value.id == "port_in_use" and caught.value.exit_code == 7
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        ({"model": "nowhere/at/all"}, "model_missing"),
        ({"max_model_len": 4096}, "bad_option"),
        ({"host": "203.0.113.1", "api_key": ["k"]}, "bad_option"),
        ({"host": "203.0.113.1"}, "no_key"),
        ({"chat_template": "no-such-file.jinja"}, "bad_option"),
        ({"quantization": "gptq"}, "quantization_mismatch"),
    ],
    ids=str,
)
def test_startup_errors_are_raised_with_their_id(start_server, arguments, id):
    with pytest.raises(AiakqError) as caught:
        start_server(**arguments)
    assert caught.value.id == id


def test_term_while_loading_ends_the_server(example_model):
    """A signal during loading ends everything at once; until then HTTP says that the model is loading."""
    code = (
        "from aiakq.arguments.server import checked\n"
        "from aiakq.server.launch import serve\n"
        "import sys\n"
        "args = checked({'model': sys.argv[1], 'port': 0}, server=True)\n"
        "sys.exit(serve(args, lambda event: print(event.kind, event.url, flush=True)))\n"
    )
    command = [sys.executable, "-P", "-c", code, str(example_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        kind, url = process.stdout.readline().split()
        assert kind == "listening"
        answer = httpx.get(f"{url}/health", trust_env=False)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        answer = httpx.get(f"{url}/ready", trust_env=False)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert answer.json()["loading"]["done"] == [] and answer.json()["loading"]["seconds"] >= 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert "ready" not in process.stdout.read()
        assert "Traceback" not in process.stderr.read()


def test_a_public_address_without_key_causes_a_warning(start_server):
    with start_server(
        host="0.0.0.0", allow_no_key=True, chat_template="{{ messages[0].content }}!", generation_config="vllm"
    ) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert any(event.kind == "warning" and "0.0.0.0" in event.message for event in server.events)
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        tokens = httpx.post(f"{server.url}/tokenize", json=body, trust_env=False).json()["tokens"]
        text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}, trust_env=False).json()["prompt"]
        assert text == "Hi!"
        assert "tinybooks" in server.ready.curl and server.url in server.ready.curl
        ran = subprocess.run(
            ["sh", "-c", server.ready.curl.replace("curl ", "curl -sS --noproxy '*' ")], capture_output=True
        )
        if ran.returncode != 127:  # a machine without curl
            assert json.loads(ran.stdout)["choices"][0]["text"]
