"""Tokenizers that hang, use much memory or crash their process: refused when they load, or one request fails alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.server.process import text_client
from aiakq.server.process.text_client import NUM_WORKERS, TextClient, client_of_request
from aiakq.server.process.text_messages import TextRequest
from aiakq.server.process.worker_queue import NUM_LONG, WorkerQueue

PADDING = {
    "strategy": {"Fixed": 2**30},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 3,
    "pad_type_id": 0,
    "pad_token": "<|pad|>",
}
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}


def split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that splits at a regular expression, before the model's own."""
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [part, own]}}


def swell(letter: str) -> dict[str, Any]:
    """A normalizer that makes ten thousand million of one letter."""
    part = {"type": "Replace", "pattern": {"String": letter}, "content": 10 * letter}
    return {"normalizer": {"type": "Sequence", "normalizers": [part] * 10}}


@pytest.fixture
def source_with(example_model, tmp_path) -> Callable[..., TokenizerSource]:
    """``source_with(**changes)`` -> the example model's tokenizer with these parts of tokenizer.json replaced."""

    def make(**changes: Any) -> TokenizerSource:
        folder = tmp_path / "model"
        shutil.copytree(example_model, folder)
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return TokenizerSource(str(folder))

    return make


def run(source: TokenizerSource, use: Callable[[TextClient], Awaitable[None]]) -> None:
    """Use a loaded client."""

    async def whole() -> None:
        client = TextClient(None, 1 << 20)
        try:
            await client.load(source)
            await use(client)
        finally:
            await client.stop()

    asyncio.run(whole())


async def ids_of(client: TextClient, text: str) -> list[int]:
    return (await client.encode([text])).token_ids[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("with_torch", [False, True])
def test_torch_is_imported_only_for_code_of_a_tokenizer(example_model, with_torch):
    async def whole() -> None:
        client = TextClient(None, 1 << 20, with_torch)
        try:
            await client.load(TokenizerSource(str(example_model)))
            ids = await ids_of(client, "It was a dark night")
            assert ids == Tokenizer.load(example_model).encode("It was a dark night")
            assert ("libtorch" in Path(f"/proc/{client._process.pid}/maps").read_text()) == with_torch
        finally:
            await client.stop()

    asyncio.run(whole())


@pytest.mark.process_failures
@pytest.mark.parametrize(
    "changes", [split("(?:a|a){18,}b"), swell("a"), swell(" ")], ids=["regex", "swelling", "swelling blanks"]
)
def test_a_tokenizer_that_fails_on_plain_text_is_refused(source_with, changes):
    source = source_with(**changes)

    async def nothing(client: TextClient) -> None: ...

    began = time.monotonic()
    with pytest.raises(AiakqError) as caught:
        run(source, nothing)
    assert caught.value.id == "model_malformed" and source.folder in str(caught.value)
    assert time.monotonic() - began < 60


@pytest.mark.process_failures
@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(?:a|a){18,}b"}, "content": ""},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9},
    ],
    ids=["regex", "swelling"],
)
def test_a_decoder_without_bounds_is_refused(source_with, decoder):
    async def nothing(client: TextClient) -> None: ...

    with pytest.raises(AiakqError, match="decoder"):
        run(source_with(decoder=decoder), nothing)


def test_padding_and_truncation_of_the_files_do_not_apply(source_with, example_model):
    source, plain = source_with(padding=PADDING, truncation=TRUNCATION), Tokenizer.load(example_model)

    async def use(client: TextClient) -> None:
        for text in ("hi", "Once upon a time there was a longer text"):
            assert await ids_of(client, text) == plain.encode(text)
            assert client.tokenizer.decode(plain.encode(text)) == plain.decode(plain.encode(text)) == text
        assert client.loaded.longest_token == plain.longest_token > 4

    run(source, use)
    assert Tokenizer.load(source.folder).encode("hi") == plain.encode("hi")


@pytest.mark.process_failures
@pytest.mark.parametrize("changes", [split("(?:q|q){18,}z"), swell("q")], ids=["regex", "swelling"])
def test_a_text_that_a_tokenizer_cannot_take_fails_alone(source_with, changes):
    async def use(client: TextClient) -> None:
        alone = await ids_of(client, "Once upon a time")
        hard = [asyncio.ensure_future(ids_of(client, 60 * "q")) for _ in range(2 * NUM_WORKERS)]
        easy = [asyncio.ensure_future(ids_of(client, "Once upon a time")) for _ in range(10)]
        assert await asyncio.gather(*easy) == [alone] * 10
        for failure in await asyncio.gather(*hard, return_exceptions=True):
            assert isinstance(failure, AiakqError) and failure.id == "tokenization" and failure.http_status == 400
        assert await ids_of(client, "Once upon a time") == alone

    run(source_with(**changes), use)


def test_the_work_of_departed_clients_is_dropped(source_with):
    """The texts take a minute, but no word alone exceeds the limit of retries. Their workers are free soon after the
    clients have disconnected, and the process that replaces them is still the same.
    """

    async def use(client: TextClient) -> None:
        assert client._process is not None
        process, began = client._process.pid, time.monotonic()
        text = 1000 * (21 * "q" + " ") + " " * (1 << 20)
        tasks = [asyncio.ensure_future(client.encode([text])) for _ in range(6)]
        while client._queue._num_long < NUM_LONG:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await ids_of(client, "others go on")
        assert time.monotonic() - began < 15
        for task in tasks:
            task.cancel()
        while client._queue._num_long or len(client._queue._free) < NUM_WORKERS:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.05)
        assert not client._queue._waiting
        assert await ids_of(client, "and still do")
        assert client._process is not None and client._process.pid == process

    run(source_with(**split("(?:q|q){18,}z")), use)


@pytest.mark.process_failures
def test_stuck_workers_are_noticed_and_replaced(source_with, monkeypatch):
    monkeypatch.setattr(text_client, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(text_client, "_EXTRA_SECONDS", 1.0)
    monkeypatch.setattr(text_client, "_REPLACE_SECONDS", 0.5)

    async def use(client: TextClient) -> None:
        client.check()
        assert client._process is not None
        first = client._process.pid
        os.killpg(first, signal.SIGSTOP)
        waiting = asyncio.ensure_future(ids_of(client, "hi"))
        await asyncio.sleep(0.6)
        with pytest.raises(AiakqError) as caught:
            client.check()
        assert caught.value.id == "tokenizer_stuck"
        assert await waiting  # by other workers
        client.check()
        assert await ids_of(client, "hi") and client._process.pid != first

    run(source_with(), use)


def workers_of(client: TextClient) -> list[psutil.Process]:
    assert client._process is not None
    return psutil.Process(client._process.pid).children()


@pytest.mark.process_failures
def test_only_a_worker_that_hangs_is_replaced_and_its_request_is_repeated(source_with, monkeypatch):
    monkeypatch.setattr(text_client, "_EXTRA_SECONDS", 0.5)

    async def use(client: TextClient) -> None:
        assert client._process is not None
        process, workers = client._process.pid, {worker.pid for worker in workers_of(client)}
        slot = client._queue._free[0].slot
        hanging = sorted(workers)[slot]
        os.kill(hanging, signal.SIGSTOP)
        assert await ids_of(client, "hi")
        assert client._process.pid == process
        now = {worker.pid for worker in workers_of(client)}
        assert hanging not in now and len(now & workers) == NUM_WORKERS - 1

    run(source_with(), use)


@pytest.mark.process_failures
def test_a_stopped_worker_is_replaced_at_once_whatever_its_request_may_take(source_with):
    async def use(client: TextClient) -> None:
        assert client._process is not None
        process, workers = client._process.pid, workers_of(client)
        for worker in workers:
            worker.suspend()
        text = "a" * (1 << 20)  # could take half a minute
        compiled = client.compile_grammar(Grammar("json", '{"type": "integer"}'))
        ids, reply = await asyncio.wait_for(asyncio.gather(ids_of(client, text), compiled), 15)
        assert ids and not reply.failure
        assert client._process.pid == process
        assert not {worker.pid for worker in workers} & {worker.pid for worker in workers_of(client)}

    run(source_with(), use)


@pytest.mark.process_failures
def test_requests_do_not_wait_for_a_process_that_is_stopped(source_with, monkeypatch):
    monkeypatch.setattr(text_client, "_STOPPED_SECONDS", 0.5)

    async def use(client: TextClient) -> None:
        assert client._process is not None
        first = client._process.pid
        os.killpg(first, signal.SIGSTOP)
        compiled = client.compile_grammar(Grammar("json", '{"type": "integer"}'))  # 22 s without that
        assert not (await asyncio.wait_for(compiled, 15)).failure
        assert client._process.pid != first

    run(source_with(), use)


@pytest.mark.process_failures
def test_a_request_whose_workers_are_killed_twice_is_not_the_fault_of_its_client(source_with):
    async def use(client: TextClient) -> None:
        text = " ".join(["qqqqqqqqqqqqqqqqqqqqq"] * 3000)
        waiting = asyncio.ensure_future(client.encode([text]))
        for _ in range(2):
            await asyncio.sleep(0.3)
            for worker in workers_of(client):
                worker.kill()
        with pytest.raises(AiakqError) as caught:
            await waiting
        assert (caught.value.id, caught.value.http_status) == ("worker_lost", 503)
        assert await ids_of(client, "hi")

    run(source_with(**split("(?:q|q){15,}z")), use)


def test_checks_of_grammars_leave_workers_to_others(source_with):
    async def use(client: TextClient) -> None:
        slow = [Grammar("json", json.dumps({"type": "integer", "multipleOf": 99991 + at})) for at in range(8)]
        checks = [asyncio.ensure_future(client.compile_grammar(grammar)) for grammar in slow]
        await asyncio.sleep(0.1)
        assert client._queue._num_long == 1 < NUM_LONG  # one of a client at a time
        assert await ids_of(client, "hi") and not all(check.done() for check in checks)
        client_of_request.set("another")
        assert not (await client.compile_grammar(Grammar("regex", "[a-z]"))).failure
        assert sum(check.done() for check in checks) < 4
        client.check()
        replies = await asyncio.gather(*checks)
        assert all(reply.num_bytes > 1 << 20 for reply in replies if not reply.failure)
        for check in checks:
            check.cancel()

    run(source_with(), use)


def test_clients_take_turns():
    """One client's ten requests do not delay another's; long ones leave workers to short ones."""

    async def take_turns() -> None:
        queue: Any = WorkerQueue()
        order: list[str] = []

        async def work(client: str, is_long: bool = False) -> None:
            channel = await queue.take(client, is_long)
            order.append(client)
            try:
                await asyncio.sleep(0.01)
            finally:
                queue.put(channel, is_long)

        queue.add("worker")
        await asyncio.gather(*(work("a") for _ in range(10)), work("b"), work("c"), work("b"))
        assert "".join(order) == "aabcab" + 7 * "a"
        order.clear()
        for _ in range(NUM_WORKERS - 1):
            queue.add("worker")
        long = [asyncio.ensure_future(work("a", True)) for _ in range(2 * NUM_WORKERS)]
        await asyncio.sleep(0)
        await asyncio.gather(*(work("a") for _ in range(4)), *long)
        assert queue._num_long == 0 and len(queue._free) == NUM_WORKERS
        waiting = [asyncio.ensure_future(work("d")) for _ in range(20)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert len(queue._free) == NUM_WORKERS and not queue._waiting
        waiting = [asyncio.ensure_future(work("e")) for _ in range(20)]
        await asyncio.sleep(0)
        queue.clear()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(result, ConnectionError) for result in results) == 20 - NUM_WORKERS

    asyncio.run(take_turns())


def test_long_texts_are_refused_before_they_are_tokenized(http):
    """The context of 1,024 tokens cannot hold them; truncation and /tokenize still take them."""
    text = "Once upon a time " * 10_000
    for route, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["short", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        failure = http.post(route, json=body | {"max_tokens": 1})
        assert failure.status_code == 400
        assert failure.json()["error"]["code"] == "context_length_exceeded"
        assert "at least " in failure.json()["error"]["message"] and "1024" in failure.json()["error"]["message"]
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 10_000
    kept = http.post(
        "/v1/completions", json={"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 9, "return_token_ids": True}
    )
    assert kept.json()["choices"][0]["prompt_token_ids"] == tokens["tokens"][-9:]


def test_clients_that_post_long_texts_and_disconnect_delay_no_others(server):
    url, text = server.url, "It was the best of times, it was the worst of times. " * 79_000

    def post_and_leave(_: int) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{url}/tokenize", json={"prompt": text, "return_token_strs": True}, timeout=1, trust_env=False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(post_and_leave, range(8)))
        began = time.monotonic()
        body = {"prompt": "Once", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
        assert time.monotonic() - began < 5


def test_health_reports_stuck_workers(start_server):
    with start_server(num_gpu_blocks_override=65) as server, ThreadPoolExecutor(1) as pool:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        (text_process,) = {int(child) for child in children} - {server.ready.engine_pid}
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        os.killpg(text_process, signal.SIGSTOP)
        waiting = pool.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "a"}, timeout=90, trust_env=False)
        deadline = time.monotonic() + 30
        while (answer := httpx.get(f"{server.url}/health", trust_env=False)).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert answer.json()["error"]["code"] == "tokenizer_stuck"
        os.killpg(text_process, signal.SIGCONT)
        assert waiting.result().status_code == 200
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_signal_ends_a_server_that_is_loading(example_model, tmp_path):
    """A tokenizer that never comes: the server does not wait for it."""
    extension = tmp_path / "slow.py"
    extension.write_text("import time\n\ndef get_tokenizer(folder):\n    time.sleep(600)\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code = "import sys; from aiakq.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["serve", "--model", str(example_model), "--port", port, "--num-gpu-blocks-override", "65"]
    words += ["--tokenizer-extension-path", str(extension)]
    server = subprocess.Popen([sys.executable, "-P", "-c", code, *words], stderr=subprocess.DEVNULL)
    try:
        deadline, done = time.monotonic() + 120, []
        while "KV pages" not in done:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            with contextlib.suppress(httpx.TransportError):
                ready = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
                done = ready.json()["loading"]["done"]
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 143
    finally:
        server.kill()
        server.wait()


def test_replies_name_what_failed(source_with):
    async def use(client: TextClient) -> None:
        reply = await client.run(TextRequest(0, texts=["Once upon"], as_json=True, with_token_texts=True))
        assert json.loads(reply.ids_json) == await ids_of(client, "Once upon")
        assert "".join(json.loads(reply.token_texts_json)) == "OnceĠupon"
        reply = await client.run(TextRequest(0, token_ids=await ids_of(client, "Once upon")))
        assert reply.text == "Once upon"
        with pytest.raises(AiakqError) as caught:
            await client.run(TextRequest(0, messages=[{"content": "no role"}]))
        assert caught.value.id == "chat_template"

    run(source_with(), use)


def test_workers_return_the_memory_of_large_texts(source_with):
    async def use(client: TextClient) -> None:
        encoded = await asyncio.gather(*(client.encode(["a story " * 125_000]) for _ in range(NUM_WORKERS)))
        assert len(encoded[0].token_ids[0]) > 100_000
        process = psutil.Process(client._process.pid)
        began = time.monotonic()
        while max(worker.memory_full_info().uss for worker in process.children()) > 64 << 20:
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.05)

    run(source_with(), use)
