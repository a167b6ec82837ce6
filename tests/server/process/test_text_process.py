"""Chat templates that loop, use much memory or access files: the request fails in about a second, alone."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from aiakq.runtime.text.tokenizer import NoTokenizer
from aiakq.server.background import RunningServer
from aiakq.server.process.text_messages import TextRequest
from aiakq.server.process.text_process import _Worker

BOMBS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set x = 'a' * 10**9 %}{{ x }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "center": "{{ 'a'.center(10**9) }}",
    "grow": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "long": "{{ 'a' * (20 * 2**20) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "attr": "{{ (messages | attr('append'))(1) }}",
    "import": "{% include '/etc/passwd' %}",
    "raise": "{{ raise_exception('Only two of us, please.') }}",
}
TEMPLATE = (
    "{% set c = messages[0].content %}"
    + "".join("{% if c == '" + name + "' %}" + bomb + "{% endif %}" for name, bomb in BOMBS.items())
    + "{{ bos_token }}{{ c }}{% if add_generation_prompt %}>{% endif %}{{ mood }}"
)


@pytest.fixture(scope="module")
def canary(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("canary") / "touched"


@pytest.fixture(scope="module")
def hostile(start_server, canary) -> Iterator[RunningServer]:
    with start_server(chat_template=TEMPLATE.replace("CANARY", str(canary))) as running:
        yield running


@pytest.fixture
def say(hostile):
    """``say(text)`` -> the answer to a conversation of one message."""

    def send(text: str, **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
        return httpx.post(f"{hostile.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)

    return send


def text_of(server: RunningServer, **fields) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, timeout=60, trust_env=False).json()["tokens"]
    return httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}, trust_env=False).json()["prompt"]


def processes_of(server: RunningServer) -> tuple[int, list[int]]:
    """The process that renders templates, and its workers."""
    ours: list[int] = []
    deadline = time.monotonic() + 60
    while len(ours) != 1:  # after a test before, it may be starting again, beside other work
        assert time.monotonic() < deadline, ours
        parents = parents_of_processes()
        ours = [pid for pid, parent in parents.items() if parent == server.process.pid and is_text_process(pid)]
    return ours[0], [pid for pid, parent in parents.items() if parent == ours[0]]


def is_text_process(pid: int) -> bool:
    try:
        return b"text_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def parents_of_processes() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return parents


@pytest.mark.parametrize("name", BOMBS)
def test_a_runaway_template_fails_alone(hostile, say, canary, name):
    wanted = {"prompt": "Long", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    completions = f"{hostile.url}/v1/completions"
    alone = httpx.post(completions, json=wanted, timeout=60, trust_env=False).json()["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        concurrent = pool.submit(httpx.post, completions, json=wanted, timeout=60, trust_env=False)
        began = time.monotonic()
        answer = say(name)
        assert time.monotonic() - began < 10
        assert concurrent.result().json()["choices"][0]["text"] == alone
    failure = answer.json()["error"]
    assert (answer.status_code, failure["code"]) == (400, "chat_template"), answer.text
    assert len(failure["message"]) < 400 and "/" not in failure["message"].replace("/etc/passwd", "")
    assert say("fine").status_code == 200
    assert not canary.exists()


def test_many_runaway_templates_at_a_time(hostile, say):
    """With more of them than workers, later requests are served."""
    with ThreadPoolExecutor(16) as pool:
        bombs = [pool.submit(say, name) for name in ("loop", "memory") * 5]
        good = [pool.submit(say, "good") for _ in range(6)]
        assert {bomb.result().status_code for bomb in bombs} == {400}
        assert {one.result().status_code for one in good} == {200}
    assert "longer than 1 s" in bombs[0].result().json()["error"]["message"]


def test_templates_get_messages_and_arguments(hostile):
    assert text_of(hostile) == "<s>Hi>" or text_of(hostile).endswith("Hi>")
    assert text_of(hostile, add_generation_prompt=False).endswith("Hi")
    assert text_of(hostile, chat_template_kwargs={"mood": " gladly"}).endswith("Hi> gladly")


@pytest.mark.process_failures
def test_template_processes_are_replaced_when_they_die(hostile, say, metrics_of):
    restarts = metrics_of(hostile.url)["aiakq:tokenizer_restarts_total"]
    parent, workers = processes_of(hostile)
    assert len(workers) == 4
    for worker in workers:
        os.kill(worker, 9)
    answers = [say("a") for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert processes_of(hostile)[0] == parent
    os.kill(parent, 9)
    deadline = time.monotonic() + 20
    while say("a").status_code != 200:
        assert time.monotonic() < deadline
    assert processes_of(hostile)[0] != parent
    assert metrics_of(hostile.url)["aiakq:tokenizer_restarts_total"] > restarts
    assert any("process is replaced: it was ended by SIGKILL" in event.message for event in hostile.events)


def test_disconnected_clients_do_not_occupy_template_workers(hostile, say):
    for _ in range(6):
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": [{"role": "user", "content": "loop"}]}
            httpx.post(f"{hostile.url}/v1/chat/completions", json=body, timeout=0.3, trust_env=False)
    assert say("fine").status_code == 200


def test_the_model_s_own_template_is_used_as_transformers_does(server, example_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(example_model)
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Well,"}]
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        ids = httpx.post(f"{server.url}/tokenize", json={"messages": messages} | fields, trust_env=False).json()[
            "tokens"
        ]
        given = {"add_generation_prompt": True} | fields
        expected = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        assert ids == tokenizer.encode(expected, add_special_tokens=False)


def test_template_processes_end_with_the_server(start_server):
    with start_server(chat_template="{{ messages[0].content }}") as server:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).status_code == 200
        )
        parent, workers = processes_of(server)
        server.stop()
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in (parent, *workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_decoders_do_not_write_to_the_log_what_clients_send(capfd):
    """The decoder of MP3 comments on every damaged frame."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(16_000) * 0.05), 16_000, format="MP3")
    damaged = buffer.getvalue()[:900] + bytes(99) + buffer.getvalue()[900:]
    worker = _Worker(NoTokenizer(), [], 1, None, None, _Spectrogram())
    reply = worker._answer(TextRequest(1, audio=damaged), lambda *limits: None)
    assert reply.spectrum.seconds > 0.5 and capfd.readouterr().err == ""


class _Spectrogram:
    def of(self, samples: np.ndarray) -> np.ndarray:
        return samples[None]

    content = staticmethod(len)
