"""``bench ab --serve``: every start of a server is one sample. The servers are scripts, except one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aiakq.arguments.comparison import AlternationArguments
from aiakq.bench.comparison.alternation import run
from aiakq.bench.comparison.sides import Side
from aiakq.cli import main
from aiakq.errors import AiakqError

#: ``python -m aiakq serve --config FILE``: a server that answers after ``seed`` milliseconds.
SERVER = """
import http.server, json, sys, time

settings = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
if settings.get("dtype") == "bfloat16":
    sys.exit("aiakq: error: no such dtype here.")
wait = settings.get("seed", 0) / 1000

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        models = {"data": [{"id": "m", "vocab_size": 50, "max_model_len": 99}]}
        pages = {"/v1/models": models, "/health": {}, "/version": {"version": "9"}}
        text = json.dumps(pages[self.path]) if self.path in pages else 'aiakq:build_info{version="9",torch="1"} 1.0\\n'
        self.answer(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) == 13:
            self.send_response(400)
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        for number in range(count):
            time.sleep(wait)
            last = "length" if number == count - 1 else None
            event = {"choices": [{"text": "a", "finish_reason": last}], "usage": usage}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(Side, "library", None)
    folder = tmp_path / "checkout"
    (folder / "aiakq").mkdir(parents=True)
    (folder / "aiakq" / "__init__.py").write_text("")
    (folder / "aiakq" / "__main__.py").write_text(SERVER)
    (folder / "kernels").mkdir()
    return str(folder)


def compare(checkout: str, **settings):
    options = {"round_seconds": 0.01, "min_rounds": 2, "max_rounds": 2, "output_len": 3, "batch_size": 2, **settings}
    engine = {"model": "m"}
    return run(AlternationArguments(base=checkout, new=checkout, serve=True, **options), engine, lambda *k: None)


def test_a_slower_server_is_found_over_http(checkout):
    settings = {"base_set": ("seed=5",), "new_set": ("seed=40",)}
    document = compare(checkout, **settings, metrics=("tpot_ms",), margin=100.0, confidence=50.0).document()
    rows = {row["metric"]: row for row in document["metrics"]}
    assert {"ttft_ms", "tpot_ms", "e2el_ms", "peak_mb", "load_s"} <= set(rows)
    assert document["verdict"] == "worse" and rows["tpot_ms"]["ratio"] > 2
    assert document["same_tokens"] and document["config"]["engines"]["new"]["seed"] == 40
    assert document["environment"]["sides"]["new"]["facts"] == {"version": "9", "torch": "1"}


def test_a_server_that_does_not_start_says_why(checkout):
    with pytest.raises(AiakqError, match="no such dtype here"):
        compare(checkout, new_set=("dtype=bfloat16",))


def test_a_request_that_fails_ends_the_comparison(checkout):
    with pytest.raises(AiakqError) as caught:
        compare(checkout, input_len=13)
    assert caught.value.id == "side_failed" and "HTTP 400" in str(caught.value)


def test_metrics_of_engines_are_none_of_servers(checkout):
    with pytest.raises(AiakqError, match="bench ab --serve has no metric 'decode_ms'"):
        compare(checkout, metrics=("decode_ms",))


def test_nothing_is_left_running(checkout):
    compare(checkout)
    running = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdecimal()]
    assert not any("aiakq-ab-" in path.read_text(errors="replace") for path in running if path.exists())


def test_the_command_measures_real_servers(example_model, capsys):
    words = [
        "bench",
        "ab",
        str(example_model),
        "--dtype",
        "float32",
        "--serve",
        "--new-set",
        "max_num_queued_reqs=99",
    ]
    words += ["--min-rounds", "2", "--max-rounds", "2", "--round-seconds", "0.1", "--output-len", "5"]
    assert main([*words, "--metric", "peak_mb", "--margin", "50", "--allow-undecided"]) in (0, 10)
    document = json.loads(capsys.readouterr().out)
    assert document["rounds"] == 2 and document["same_tokens"]
    rows = {row["metric"]: row for row in document["metrics"]}
    assert rows["peak_mb"]["base"] > 50 and rows["cpu_ms"]["base"] > 0
    assert document["environment"]["sides"]["base"]["facts"]["torch"]
