"""The server behind nginx, under a sub-path: every request here goes through a real nginx."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiakq.arguments.server import checked
from aiakq.server.api.routes import load_routes

CONFIG = (Path(__file__).parents[3] / "examples" / "deploy" / "nginx" / "aiakq.conf").read_text()
KEY = {"authorization": "Bearer secret"}
MAIN = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {server}
}}
"""


@pytest.fixture
def proxy(tmp_path, free_port) -> Callable[..., Any]:
    """``with proxy(upstream, timeout) as client``: nginx with the configuration in front of ``upstream``."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: apt install nginx-light")

    @contextmanager
    def start(upstream: str, timeout: str = "300s") -> Iterator[httpx.Client]:
        port = free_port()
        own = CONFIG.replace("server 127.0.0.1:8000;", f"server {upstream};")
        own = own.replace("listen 8080;", f"listen 127.0.0.1:{port};")
        own = own.replace("proxy_read_timeout 300s;", f"proxy_read_timeout {timeout};")
        file = tmp_path / "nginx.conf"
        file.write_text(MAIN.format(folder=tmp_path, server=own))
        process = subprocess.Popen([program, "-c", str(file), "-p", str(tmp_path)], stderr=subprocess.PIPE)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
                deadline = time.monotonic() + 20
                while True:
                    try:
                        client.get("/")
                        break
                    except httpx.ConnectError:
                        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read().decode()
                        time.sleep(0.05)
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)

    return start


def test_only_paths_for_clients_are_passed_on():
    """What the configuration passes on, by its expression: everything but metrics and administration."""
    [passed_on] = re.findall(r"location ~ (\S+) {", CONFIG)
    arguments = checked({"model": "m", "enable_admin_routes": True}, server=True)
    inside = {"/metrics", "/load", "/pooling", "/classify", "/v2/rerank"}
    for route in load_routes(arguments):
        path = route.openapi_path.replace("{name}", "a/b")
        hidden = route.tag in ("admin", "pooling") and path not in ("/v1/embeddings", "/v1/score", "/v1/rerank")
        for spelled in (path, f"{path}/"):
            found = re.search(passed_on, "/llm" + spelled) is not None
            assert found == (not hidden and path not in inside), spelled
            assert not re.search(passed_on, spelled)


def test_everything_works_under_the_path(serve, proxy):
    with serve(root_path="/llm", api_key=["secret"], allowed_hosts=["*"], enable_admin_routes=True) as server:
        with proxy(server.url.removeprefix("http://")) as client:
            assert client.get("/llm/health").status_code == client.get("/llm/live").status_code == 200
            assert client.get("/llm/v1/models").status_code == 401
            assert client.get("/llm/v1/models", headers=KEY).json()["object"] == "list"
            assert client.get("/llm/openapi.json", headers=KEY).json()["servers"] == [{"url": "/llm"}]
            body = {"prompt": "Once", "max_tokens": 4}
            answer = client.post("/llm/v1/completions", json=body, headers=KEY)
            assert answer.status_code == 200 and answer.headers["x-request-id"]
            for path in (
                "metrics",
                "load",
                "reset_prefix_cache",
                "abort_requests",
                "speculation",
                "v1/load_lora_adapter",
            ):
                for spelled in (path, f"{path}/", f"/{path}", f"v1/../{path}", path.replace("e", "%65")):
                    for method in ("GET", "POST"):
                        assert client.request(method, f"/llm/{spelled}", headers=KEY).status_code == 404, spelled
            assert client.get("/v1/models", headers=KEY).status_code == 404
            wrong = client.post("/llm/v1/completions", content=b"{", headers=KEY | {"content-type": "application/json"})
            assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "invalid_json"


def test_streams_come_event_by_event_and_end_with_their_client(serve, proxy):
    with serve(root_path="/llm") as server, proxy(server.url.removeprefix("http://")) as client:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        times = [time.monotonic()]
        with client.stream("POST", "/llm/v1/completions", json=body) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            pieces = []
            for piece in stream.iter_raw():
                pieces.append(piece)
                times.append(time.monotonic())
        assert pieces[-1].endswith(b"data: [DONE]\n\n")
        assert len(pieces) > 50 and times[1] - times[0] < (times[-1] - times[0]) / 4, "the events came all at once"
        with client.stream("POST", "/llm/v1/completions", json=body | {"max_tokens": 900}) as stream:
            next(stream.iter_lines())
        deadline = time.monotonic() + 20
        with httpx.Client(base_url=server.url, trust_env=False) as direct:
            while direct.get("/load").json()["server_load"]:
                assert time.monotonic() < deadline, "nginx did not close the connection of the client that left"
                time.sleep(0.05)


def test_silence_is_no_reason_to_close_a_stream(serve, proxy):
    """One sequence at a time: what waits is kept open by comments, longer than nginx waits for a silent server."""
    options = {"max_num_seqs": 1, "sse_keep_alive_interval": 0.2}
    with serve(root_path="/llm", **options) as server, proxy(server.url.removeprefix("http://"), "1s") as client:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/llm/v1/completions", json=body | {"n": 3}) as running:
            events = running.iter_lines()
            next(events)
            with client.stream("POST", "/llm/v1/completions", json=body | {"max_tokens": 2}) as waiting:
                lines = list(waiting.iter_lines())
    assert lines[0] == ": keep-alive" and lines[-2] == "data: [DONE]"


def test_a_socket_instead_of_a_port(serve, proxy, tmp_path):
    path = tmp_path / "s"
    with serve(root_path="/llm", uds=str(path)), proxy(f"unix:{path}") as client:
        body = {"prompt": "Once", "max_tokens": 3, "stream": True}
        with client.stream("POST", "/llm/v1/completions", json=body) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
