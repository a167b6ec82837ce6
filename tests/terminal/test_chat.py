"""``aiakq chat``: one answer without a terminal, a conversation on one, commands, two models, failures."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from aiakq.errors import AiakqError
from aiakq.server.background import RunningServer, start_in_background
from aiakq.terminal import chat_images
from aiakq.terminal.chat_client import Answer, ChatServer, common_tokens, events
from aiakq.terminal.chat_session import ChatSession, difference, printable, timing

KEYED = ("--url", "URL", "--api-key", "secret")
GREEDY = ("--params", "temperature=0", "--params", "max_tokens=12")


@pytest.fixture(scope="module")
def server(example_model) -> Iterator[RunningServer]:
    options = {"model": str(example_model), "dtype": "float32", "num_gpu_blocks_override": 257, "api_key": ["secret"]}
    with start_in_background({**options, "served_model_name": ["tinybooks", "other"]}, timeout=240) as running:
        yield running


@pytest.fixture
def talk(server, monkeypatch) -> Iterator:
    """``talk(*lines, models=1)`` types the lines and ends; returns the session."""
    opened: list[ChatServer] = []

    def run(*lines: str, models: int = 1) -> ChatSession:
        typed = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        opened.extend(ChatServer(server.url, "secret") for _ in range(models))
        session = ChatSession(opened[-models:], None, {"temperature": 0, "max_tokens": 12}, read)
        session.run()
        return session

    yield run
    for each in opened:
        each.close()


def test_one_answer_without_a_terminal(program, server):
    words = [program, "chat", "--url", server.url, *GREEDY]
    environment = {**os.environ, "AIAKQ_API_KEY": "secret"}
    done = subprocess.run(words, input="Hello", capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    body = {"model": "other", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
    key = {"authorization": "Bearer secret"}
    expected = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key, timeout=60, trust_env=False)
    assert done.stdout == expected.json()["choices"][0]["message"]["content"] + "\n"
    assert done.stderr == ""


def test_a_model_is_loaded_for_it_and_compared(process, example_model):
    engine = ("--dtype", "float32", "--num-gpu-blocks-override", "129")
    words = ("chat", example_model, "--compare", example_model, *engine, "--prompt", "Hello", "--json", *GREEDY)
    ended = process(*words)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["kind"] == "chat" and document["params"] == {"temperature": 0, "max_tokens": 12}
    one, two = document["answers"]
    assert one["text"] == two["text"] and one["usage"]["completion_tokens"] == 12 == document["common_tokens"]
    assert one["finish_reason"] == "length" and 0 < one["ttft_ms"] < 1000 * one["seconds"]


def test_two_answers_without_a_terminal(aiakq, server):
    words = ("chat", "--url", server.url, "--compare", server.url, "--api-key", "secret", "--prompt", "Hello", *GREEDY)
    ended = aiakq(*words)
    assert ended.code == 0 and ended.out.startswith("A: tinybooks\n") and "\nB: tinybooks\n" in ended.out
    assert ended.last == "Both answers are the same."


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["chat", "MODEL", "--url", "http://127.0.0.1:1", "--prompt", "a"], 2, "--compare"),
        (["chat", "--url", "http://127.0.0.1:1", "--prompt", "a"], 7, "No server answers at http://127.0.0.1:1"),
        (["chat", "--url", "URL", "--prompt", "a"], 9, "API key"),
        (["chat", "--url", "URL", "--api-key", "secret", "--model", "no", "--prompt", "a"], 2, "tinybooks, other"),
        (["chat", "--url", "URL", "--api-key", "secret", "-p", "top_p=7", "--prompt", "a"], 9, "top_p"),
        (["chat", "--params", "temperature", "--prompt", "a"], 2, "NAME=VALUE"),
        (["chat", "--dtype", "float32", "--prompt", "a"], 2, "aiakq chat MODEL"),
        (["chat", "--prompt", " "], 2, "nothing to answer"),
        (["chat", "--image", "/no/file", "--prompt", "a"], 2, "No such file"),
        (["chat", *KEYED, "--image", __file__, "--prompt", "a"], 2, "--image is not supported: tinybooks reads text"),
    ],
    ids=str,
)
def test_failures_are_one_line(aiakq, server, example_model, words, code, text):
    names = {"URL": server.url, "MODEL": str(example_model)}
    ended = aiakq(*(names.get(word, word) for word in words))
    assert text in ended.last and "aiakq: error[" in ended.last and ended.out == ""
    assert ended.code == code


def test_a_conversation_is_sent_whole(talk, capsys):
    session = talk("Hello", "/system Be brief.", "And", "/params max_tokens=3 seed=5 temperature=", "Then")
    assert session.questions == ["Hello", "And", "Then"]
    roles = [message["role"] for message in session._messages(0)]
    assert roles == ["system", *("user", "assistant") * 3]
    assert session.params == {"max_tokens": 3, "seed": 5}
    shown = capsys.readouterr()
    assert all(answer in shown.out for answer in session.answers[0])
    assert "params: max_tokens=3 seed=5" in shown.err and "12 tokens, first after" in shown.err


def test_slash_commands_are_executed(talk, capsys, tmp_path):
    file = tmp_path / "chat.json"
    first = talk("Hello", "/retry", f"/save {file}", "/rest", "/params x", "/help", "^C", "", "/exit", "never read")
    saved = json.loads(file.read_text())
    assert saved["conversations"][0]["messages"] == first._messages(0) and len(first.questions) == 1
    err = capsys.readouterr().err
    for text in ("There is no command /rest. Did you mean /reset", "NAME=VALUE", "/save FILE", "Ctrl-D or /exit"):
        assert text in err
    again = talk("/retry", "Hello", "/reset", "/save", "/system")
    assert again.questions == [] and again.answers == [[]]
    err = capsys.readouterr().err
    assert "There is no question yet" in err and "A new conversation" in err and "system: none" in err
    assert "/save needs the name" in err


def test_texts_of_several_lines(talk):
    session = talk('"""first', "second", 'third"""', "one\\", "two", '"""in one line"""', '"""', "alone", '"""')
    assert session.questions == ["first\nsecond\nthird", "one\ntwo", "in one line", "alone"]


def test_a_failed_question_is_dropped(talk, capsys):
    session = talk("/params top_p=7", "Hello", "/params top_p=", "Hello again")
    assert session.questions == ["Hello again"] and len(session.answers[0]) == 1
    assert "error[request_refused]" in capsys.readouterr().err


def test_two_models_side_by_side(talk, capsys):
    session = talk("Hello", models=2)
    assert session.answers[0] == session.answers[1] and session.answers[0][0]
    shown = capsys.readouterr()
    assert "A tinybooks" in shown.out and "B tinybooks" in shown.out and "Both answers are the same." in shown.err


class Endless(BaseHTTPRequestHandler):
    """A server whose answers end when the client leaves."""

    left = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "endless"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b'data: {"choices": [{"index": 0, "delta": {"content": "on and "}}]}\n\n')
                time.sleep(0.02)
        except OSError:
            self.left.set()

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_ctrl_c_stops_the_answer_and_not_the_program(program, endless):
    """On a real terminal."""
    leader, follower = pty.openpty()
    words = [program, "chat", "--url", endless]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    )
    os.close(follower)
    seen = ""

    def wait_for(text: str, seconds: float = 60.0) -> None:
        nonlocal seen
        deadline = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([leader], [], [], 0.2)[0]:
                seen += os.read(leader, 1 << 16).decode(errors="replace")

    try:
        wait_for("> ")
        os.write(leader, b"A long story\n")
        seen = ""
        wait_for("on and on and")
        os.killpg(process.pid, signal.SIGINT)
        wait_for("stopped")
        assert Endless.left.wait(10)
        os.write(leader, b"/exit\n")
        assert process.wait(30) == 0
        assert "Traceback" not in seen
    finally:
        process.kill()
        os.close(leader)


def test_what_a_model_writes_cannot_drive_the_terminal():
    hostile = "a\x1b[2J\x07b\u202e\x9b31m\r\n\tc é 中 👩\u200d🔬"
    assert printable(hostile) == "a\\x1b[2J\\x07b\\u202e\\x9b31m\\r\n\tc é 中 👩\u200d🔬"


def test_differences_in_words():
    one, two = Answer("a", "a b", tokens=[("a", -0.5), (" b", -1.0)]), Answer("b", "a", tokens=[("a", -0.5)])
    assert common_tokens(one, two) == 1
    assert difference(one, two) == (
        "Tokens in common: 1. The next token of A: ' b' (log-probability -1.00), of B: none."
    )
    assert difference(Answer("a", "x"), Answer("b", "y")) == "The answers differ."
    assert timing(Answer("a")) == "no answer"


def test_a_stream_without_its_end_is_noticed():
    assert list(events([b": comment\nda", b"ta: 1\r\n\r\ndata: [DONE]", b"\ndata: 2\n"])) == ["1"]
    assert list(events([b"data: 1\n\ndata: [DONE]"])) == ["1"]
    with pytest.raises(httpx.RemoteProtocolError):
        list(events([b"data: 1"]))


def test_a_server_that_is_killed_in_the_middle(example_model):
    options = {"model": str(example_model), "dtype": "float32", "num_gpu_blocks_override": 129}
    with start_in_background(options, timeout=240) as running:
        client = ChatServer(running.url, None)
        stream = client.ask([{"role": "user", "content": "a"}], {"max_tokens": 900, "ignore_eos": True}, False)
        next(stream)
        running.kill()
        with pytest.raises(AiakqError, match="in the middle"):
            list(stream)
        client.close()


class Noting(ChatServer):
    """A server of a model that reads images, which notes the conversations that it gets."""

    model = "seeing"

    def __init__(self, *modalities: str) -> None:
        self._modalities = list(modalities)
        self.got: list[list[Mapping[str, object]]] = []

    def ask(self, messages, params, logprobs):
        self.got.append(list(messages))
        yield Answer(self.model, "It is a cat.")


def test_images_go_with_the_next_message_and_stay_in_the_conversation(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"one")
    typed = iter([f"/image {tmp_path}/a.png", "And this?", "Why?", "/image", "/image /no/file", "/exit"])
    server = Noting("text", "image")
    session = ChatSession([server], None, {}, lambda prompt: next(typed), images=["https://host/b.png"])
    session.images += ["http://host/c.png"]
    session.run()
    urls = ["https://host/b.png", "http://host/c.png", "data:image/png;base64,b25l"]
    first = [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [{"type": "text", "text": "And this?"}]
    answer = {"role": "assistant", "content": "It is a cat."}
    asked = [{"role": "user", "content": first}, answer, {"role": "user", "content": "Why?"}]
    assert server.got == [asked[:1], asked]
    err = capsys.readouterr().err
    assert "next message: 3." in err and "next message: 0." in err and "No such file" in err


def test_a_model_of_text_refuses_images_before_anything_is_sent(capsys):
    typed = iter(["/image https://host/a.png", "/exit"])
    session = ChatSession([Noting("text")], None, {}, lambda prompt: next(typed))
    session.run()
    assert session.images == [] and "/image is not supported: seeing reads text only" in capsys.readouterr().err


def test_files_that_are_too_large_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_images, "MAX_FILE_BYTES", 2)
    (tmp_path / "a.png").write_bytes(b"one")
    with pytest.raises(AiakqError, match="a file of at most"):
        chat_images.image_url(str(tmp_path / "a.png"), "--image")
