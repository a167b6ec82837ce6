"""Traces in a third-party collector, Arize Phoenix, over both protocols, and requests while it is down.

    python tests/server/trace_collector.py [--phoenix PROGRAM]

Phoenix is looked for on the path, or where --phoenix says (an environment of its own: pip install arize-phoenix);
without it one line says so. Prints one JSON document per protocol; exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from aiakq.server.background import RunningServer, start_in_background

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tinybooks"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"prompt": "Once upon", "max_tokens": 5, "ignore_eos": True, "temperature": 0, "model": "tinybooks"}


class Phoenix:
    """A Phoenix server on two ports, which can be killed and started again on what it has stored."""

    def __init__(self, program: str, folder: str) -> None:
        self.http_port, self.grpc_port = _free_ports(2)
        self._program, self._folder = program, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", trust_env=False, timeout=60)

    def start(self) -> None:
        """Start it and wait until it can be asked."""
        ports = {"PHOENIX_PORT": str(self.http_port), "PHOENIX_GRPC_PORT": str(self.grpc_port)}
        where = {"PHOENIX_HOST": "127.0.0.1", "PHOENIX_WORKING_DIR": self._folder, "PHOENIX_TELEMETRY_ENABLED": "false"}
        environment = {**os.environ, **ports, **where}
        command = [self._program, "serve"]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait(self._answers, 120, "Phoenix does not start")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it; after SIGKILL it is gone."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def spans(self, name: str = "") -> list[dict[str, Any]]:
        """What it has stored."""
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self._client.get("/v1/projects/default/spans", params={"limit": 1000, "cursor": cursor or ""})
            if page.status_code == 404:  # nothing has come
                return []
            found += page.json()["data"]
            cursor = page.json().get("next_cursor")
            if not cursor:
                return [span for span in found if name in ("", span["name"])]

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self._client.get("/v1/projects").status_code == 200
        return False


def attributes_and_parents(server: RunningServer, phoenix: Phoenix) -> dict[str, Any]:
    """A request in its client's trace, one that is not sampled, one that is refused, and a stream."""
    began = datetime.now(UTC).isoformat()  # as Phoenix writes times
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        answer = client.post("/v1/completions", json=BODY, headers={"traceparent": PARENT})
        client.post("/v1/completions", json=BODY, headers={"traceparent": PARENT[:-1] + "0"})
        client.post("/v1/completions", json={"prompt": {}})
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
        client.post("/v1/chat/completions", json=chat)

    def requests() -> list[dict[str, Any]]:
        new = [span for span in phoenix.spans("llm_request") if span["start_time"] > began]
        return sorted(new, key=lambda span: str(span["start_time"]))

    _wait(lambda: len(requests()) >= 3, 30, "spans do not arrive")
    spans = phoenix.spans()
    first, refused, stream = requests()
    values, identity = first["attributes"], first["context"]
    children = {span["name"] for span in spans if span["parent_id"] == identity["span_id"]}
    return {
        "in the client's trace": [identity["trace_id"], first["parent_id"]] == PARENT.split("-")[1:3],
        "named in the response": answer.headers["traceparent"].split("-")[2] == identity["span_id"],
        "attributes are understood": values["llm.model_name"] == "tinybooks"
        and (values["llm.token_count.prompt"], values["llm.token_count.completion"]) == (3, 5)
        and values["gen_ai.operation.name"] == "text_completion",
        "details": {"read_body", "tokenize", "queue", "prefill", "decode"} <= children,
        "a refusal is no error of the server": refused["status_code"] == "UNSET"
        and "error.type" in refused["attributes"],
        "streams too": stream["attributes"]["gen_ai.request.stream"] is True,
    }


def service_without_it(server: RunningServer, phoenix: Phoenix) -> dict[str, Any]:
    """Milliseconds of requests (median, maximum) while it is up, killed, frozen; spans arrive again afterwards."""
    times = {"up": _ask(server)}
    phoenix.send(signal.SIGKILL)
    times["killed"] = _ask(server)
    phoenix.start()
    again = _arrive_again(server, phoenix)
    phoenix.send(signal.SIGSTOP)
    times["frozen"] = _ask(server)
    phoenix.send(signal.SIGCONT)
    return {
        "milliseconds": times,
        "arrive again after it was killed": again,
        "after a freeze": _arrive_again(server, phoenix),
    }


def _arrive_again(server: RunningServer, phoenix: Phoenix) -> bool:
    time.sleep(6)  # a batch that is being sent may be given up until then
    before = len(phoenix.spans("llm_request"))
    _ask(server, 20)
    _wait(lambda: len(phoenix.spans("llm_request")) >= before + 20, 30, "spans do not arrive again")
    return True


def _ask(server: RunningServer, count: int = 200) -> list[float]:
    times = []
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for _ in range(count):
            began = time.monotonic()
            assert client.post("/v1/completions", json=BODY).status_code == 200
            times.append(1000 * (time.monotonic() - began))
    times.sort()
    return [round(times[count // 2], 1), round(times[-1], 1)]


def check(program: str, protocol: str) -> dict[str, Any]:
    """Everything over one protocol."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Phoenix(program, folder)) as phoenix:
        port = {"http": phoenix.http_port, "grpc": phoenix.grpc_port}[protocol]
        arguments = {"model": str(MODEL), "served_model_name": ["tinybooks"], "dtype": "float32"}
        traces = {"otlp_traces_endpoint": f"{protocol}://127.0.0.1:{port}", "collect_detailed_traces": ["all"]}
        with start_in_background({**arguments, **traces}, timeout=240) as server:
            found: dict[str, Any] = {"protocol": protocol, "before it is there": _ask(server)}
            phoenix.start()
            found["arrive once it is there"] = _arrive_again(server, phoenix)
            found |= attributes_and_parents(server, phoenix)
            found |= service_without_it(server, phoenix)
            phoenix.send(signal.SIGSTOP)
            _ask(server, 20)
            began = time.monotonic()
            found["exit code"] = server.stop()
            found["seconds to stop while it is frozen"] = round(time.monotonic() - began, 1)
            phoenix.send(signal.SIGCONT)
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"trace_collector: {failure}")
        time.sleep(0.3)


def main() -> int:
    """Check both protocols."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phoenix", default="phoenix", help="the program, if it is not on the path")
    program = shutil.which(parser.parse_args().phoenix)
    if program is None:
        print("Phoenix is not installed (pip install arize-phoenix): nothing was checked", file=sys.stderr)
        return 0
    good = True
    for protocol in ("http", "grpc"):
        found = check(program, protocol)
        good &= all(value for value in found.values() if isinstance(value, bool)) and found["exit code"] == 0
        print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
