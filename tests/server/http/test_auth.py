"""Access control: API keys, host names and origins."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest
from openai import OpenAI
from starlette.requests import Request

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.server.api.routes import keyless_paths, load_routes
from aiakq.server.background import RunningServer
from aiakq.server.http.auth import Keys, client_of, host_name, parse_list, read_keys

KEYS = ("first-key-1234", "second/key+5678")
BODY = {"prompt": "Once", "max_tokens": 2}
ARGS = checked({"model": "m"}, server=True)
OPEN = keyless_paths(load_routes(ARGS), ARGS)


@pytest.fixture(scope="module")
def guarded(start_server, tmp_path_factory) -> Iterator[RunningServer]:
    """A server with a key in a file and one among its arguments, open to one origin."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(f"# the first\n\n{KEYS[0]}\n")
    page = {"allowed_origins": ["https://page.example"], "allow_credentials": True}
    with start_server(api_key_file=str(file), api_key=[KEYS[1]], **page) as server:
        yield server


@pytest.fixture
def ask(guarded) -> Iterator[Callable[..., httpx.Response]]:
    """``ask(method, path, key=..., **httpx)`` of the guarded server."""
    with httpx.Client(base_url=guarded.url, timeout=60, trust_env=False) as client:

        def send(method: str, path: str, key: str | None = None, headers=None, **values) -> httpx.Response:
            headers = dict(headers or {})
            if key is not None:
                headers["authorization"] = f"Bearer {key}"
            return client.request(method, guarded.url + path, headers=headers, **values)

        yield send


def is_refused(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    failure = answer.json()["error"]
    assert set(failure) == {"message", "type", "param", "code"} and failure["code"] == code
    assert "x-request-id" in answer.headers


def test_every_path_requires_a_key_however_it_is_spelled(guarded, ask):
    """Whatever the application routes, and under every spelling of it."""
    routes = ask("GET", "/openapi.json", key=KEYS[0]).json()["paths"]
    paths = [path.replace("{name}", "tinybooks") for path in routes] + ["/docs", "/openapi.json", "/nowhere", "/"]
    assert OPEN <= set(paths)
    tricks = ["/{}", "//{}", "/./{}", "/{}/", "/%2e%2e/{}", "/x/../{}", "/{}?key=first-key-1234", "/health/../{}"]
    for path in paths:
        for trick in tricks:
            spelt = trick.format(path.lstrip("/"))
            if spelt.partition("?")[0] in OPEN:
                continue
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
                assert raw_status(guarded, method, spelt) == 401, (method, spelt)
    for path in OPEN:
        assert ask("GET", path).status_code == 200


def raw_status(server: RunningServer, method: str, target: str, headers: str = "") -> int:
    """The status of an answer to a request that no client would normalize."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"{method} {target} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n{headers}\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "header",
    [
        "authorization: Bearer wrong",
        "authorization: Bearer",
        "authorization: Basic first-key-1234",
        "authorization: first-key-1234",
        "authorization: Bearer first-key-123",
        "authorization: Bearer first-key-1234, second/key+5678",
        "authorization: Bearer \xff\xfe",
        "x-api-key: first-key-123",
        "x-api-key: Bearer first-key-1234",
        "x-forwarded-host: localhost",
        "x-original-url: /health",
    ],
)
def test_invalid_authorization_headers_are_refused(guarded, header):
    assert raw_status(guarded, "GET", "/v1/models", header + "\r\n") == 401


def test_every_configured_key_is_accepted(guarded, ask):
    for key in KEYS:
        assert ask("POST", "/v1/completions", key=key, json=BODY).status_code == 200
        assert raw_status(guarded, "GET", "/v1/models", f"x-api-key: {key}\r\n") == 200
    assert raw_status(guarded, "GET", "/v1/models", f"authorization: bearer  {KEYS[0]}\r\n") == 200
    is_refused(ask("POST", "/v1/completions", json=BODY), 401, "invalid_api_key")
    assert ask("GET", "/v1/models").headers["www-authenticate"] == "Bearer"
    with httpx.Client(trust_env=False) as plain:
        client = OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS[0], max_retries=0, http_client=plain)
        assert client.models.list().data


def test_keys_are_not_visible_in_processes_or_events(guarded):
    for pid in (guarded.process.pid, guarded.ready.engine_pid):
        with open(f"/proc/{pid}/cmdline", "rb") as line:
            words = line.read()
        assert not any(key.encode() in words for key in KEYS)
    assert not any(key in event.message for key in KEYS for event in guarded.events)
    assert "$AIAKQ_API_KEY" in guarded.ready.curl


def test_cached_pages_are_not_shared_between_keys_or_salts(ask):
    """How soon an answer begins would tell what others have asked."""

    def cached(key: str, **fields) -> int:
        body = {"prompt": "One day the old king called his three sons. " * 8, "max_tokens": 1, **fields}
        answer = ask("POST", "/v1/completions", key=key, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, second = KEYS
    assert cached(first) == 0 and cached(first) > 0
    assert cached(second) == 0 and cached(second) > 0
    assert cached(first, cache_salt="a") == 0 and cached(first, cache_salt="a") > 0
    assert cached(first, cache_salt="b") == 0 and cached(second, cache_salt="a") == 0


def test_administration_can_have_a_key_of_its_own(start_server, tmp_path):
    file = tmp_path / "admin"
    file.write_text("operator\n")
    options = {"api_key": [KEYS[0]], "admin_api_key_file": str(file), "enable_admin_routes": True, "root_path": "/a"}
    with start_server(**options) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        for path in ("/reset_prefix_cache", "/reset_prefix_cache/", "/a/reset_prefix_cache", "/a/reset_prefix_cache/"):
            statuses = []
            for headers in ({}, {"authorization": f"Bearer {KEYS[0]}"}, {"x-api-key": "operator"}):
                statuses.append(client.post(path, headers=headers).status_code)
            assert statuses == [401, 403, 200], path
        refused = client.post("/abort_requests", headers={"authorization": f"Bearer {KEYS[0]}"})
        is_refused(refused, 403, "admin_key_required")
        for key in (KEYS[0], "operator"):
            assert client.post("/v1/completions", json=BODY, headers={"x-api-key": key}).status_code == 200
    with pytest.raises(AiakqError):
        start_server(admin_api_key=["a"])


def test_keys_are_compared_as_hashes():
    keys = Keys(["a", "b"])
    assert len(keys) == 2 and keys.owner("a") and keys.owner("b")
    assert not keys.owner("") and not keys.owner("ab") and not keys.owner("\xff")
    assert not any(b"a" == digest for digest in keys._digests)


def test_the_key_of_vllm_protects_the_server_if_there_is_no_other():
    without = checked({}, server=True)
    only = read_keys(without, {"VLLM_API_KEY": "a,b"})
    assert only and only.owner("a,b") and only.owner("a") is None, "it is one key"
    both = read_keys(without, {"VLLM_API_KEY": "a", "AIAKQ_API_KEY": "c"})
    assert both.owner("c") and both.owner("a") is None
    given = read_keys(checked({"api_key": ["d"]}, server=True), {"VLLM_API_KEY": "a"})
    assert given.owner("d") and given.owner("a") is None
    assert not read_keys(without, {"VLLM_API_KEY": ""})


def test_keys_come_from_arguments_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a\n# b\n c \n")
    keys = read_keys(checked({"api_key": ["d"], "api_key_file": str(file)}, server=True), {"AIAKQ_API_KEY": "e,f"})
    assert len(keys) == 5 and all(map(keys.owner, "acdef")) and not keys.owner("b")


def test_bad_keys_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for given in (
        {"api_key": ["with space"]},
        {"api_key": ""},
        {"api_key": [""]},
        {"api_key": ["schlüssel"]},
        {"api_key_file": str(tmp_path / "none")},
        {"api_key_file": str(empty)},
    ):
        with pytest.raises(AiakqError) as caught:
            read_keys(checked(given, server=True), {})
        assert caught.value.id == "bad_option" and "schlüssel" not in str(caught.value)


# --- addresses, names and origins


def test_a_public_address_requires_a_key(example_model):
    program = "import sys; from aiakq.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", str(example_model), "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    said = " ".join(done.stderr.split())
    assert "error[no_key]" in said and "--allow-no-key" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("203.0.113.5", 200),  # an address is not a name that was bent
        ("evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("x", 421),
    ],
)
def test_foreign_host_names_are_refused_on_a_loopback_address(http, host, status):
    answer = http.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 421:
        is_refused(answer, 421, "host_not_allowed")


def test_allowed_hosts_and_metrics_without_key(start_server):
    with start_server(allowed_hosts=["Model.example"], api_key=["k"], metrics_without_key=True) as server:
        for host, status in (("model.example:80", 200), ("localhost", 200), ("other.example", 421)):
            assert httpx.get(f"{server.url}/health", headers={"host": host}, trust_env=False).status_code == status
        assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 401


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", ""])
def test_requests_from_other_origins_are_refused(http, origin):
    for answer in (
        http.post("/v1/completions", json=BODY, headers={"origin": origin}),
        http.get("/v1/models", headers={"origin": origin}),
        http.options("/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}),
    ):
        is_refused(answer, 403, "origin_not_allowed")
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_requests_from_the_same_origin_are_accepted(http):
    own = str(http.base_url).rstrip("/")
    assert http.post("/v1/completions", json=BODY, headers={"origin": own}).status_code == 200


def test_an_allowed_origin_gets_cors_headers(ask):
    page = {"origin": "https://page.example"}
    ready = ask("OPTIONS", "/v1/completions", headers=page | {"access-control-request-method": "POST"})
    assert ready.status_code == 200 and ready.headers["access-control-allow-origin"] == "https://page.example"
    assert ready.headers["access-control-allow-credentials"] == "true"
    answer = ask("POST", "/v1/completions", key=KEYS[0], json=BODY, headers=page)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = ask("POST", "/v1/completions", json=BODY, headers=page)
    is_refused(refused, 401, "invalid_api_key")
    is_refused(
        ask("GET", "/v1/models", key=KEYS[0], headers={"origin": "https://other.example"}), 403, "origin_not_allowed"
    )


def test_json_lists_are_accepted_as_in_vllm():
    assert parse_list(None) == [] and parse_list(["a", "b"]) == ["a", "b"]
    assert parse_list(['["a"', ' "b"]']) == parse_list(['["a", "b"]']) == ["a", "b"]
    with pytest.raises(AiakqError):
        parse_list(["[a"])


def test_host_names_are_parsed_without_port_and_brackets():
    spelt = {"a.b:80": "a.b", "a.b.": "a.b", "[::1]:8": "::1", "::1": "", "127.0.0.1": "127.0.0.1"}
    assert {host: host_name(host) for host in spelt} == spelt


def test_requests_refused_by_access_control_are_counted(guarded, ask):
    """Those to generate: received and failed, as if a route had refused them."""

    def counts() -> list[float]:
        text = ask("GET", "/metrics", key=KEYS[0]).text
        names = ("request_total", "request_process_fail_total", "request_process_success_total")
        return [float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for name in names]

    before = counts()
    assert ask("POST", "/v1/completions", json=BODY).status_code == 401
    assert ask("POST", "/v1/chat/completions", key="wrong", json=BODY).status_code == 401
    foreign = {"origin": "https://evil.example"}
    assert ask("POST", "/v1/completions", key=KEYS[0], headers=foreign, json=BODY).status_code == 403
    assert ask("POST", "/v1/completions", headers={"host": "evil.example"}, json=BODY).status_code == 421
    assert ask("POST", "/tokenize", json={"prompt": "a"}).status_code == 401
    assert ask("GET", "/v1/models").status_code == 401
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [4, 4, 0]


def request_from(address: str | None, owner: str = "") -> Request:
    client = None if address is None else (address, 4711)
    return Request({"type": "http", "client": client, "state": {"owner": owner} if owner else {}})


def test_a_client_is_a_key_or_else_an_address():
    keys = Keys(["a", "b"])
    one, two = (keys.owner(key) for key in "ab")
    assert client_of(request_from("10.0.0.1", one)) == client_of(request_from("10.0.0.2", one))
    assert client_of(request_from("10.0.0.1", one)) != client_of(request_from("10.0.0.1", two))
    assert client_of(request_from("10.0.0.1")) != client_of(request_from("10.0.0.2"))
    assert client_of(request_from("2001:db8::1")) == client_of(request_from("2001:db8::ffff:2"))
    assert client_of(request_from("2001:db8::1")) != client_of(request_from("2001:db8:0:1::1"))
    assert client_of(request_from("fe80::1%eth0")) == client_of(request_from("fe80::2"))
    assert client_of(request_from(None)) == client_of(request_from(None))


@pytest.mark.parametrize(
    ("options", "clients"),
    [({"api_key": list(KEYS)}, 2), ({"api_key": list(KEYS), "fair_share": False}, 1), ({"fair_share": True}, 1)],
    ids=["keys", "not wanted", "one address"],
)
def test_clients_with_different_keys_share_the_engine(start_server, options, clients):
    body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
    seen, metrics = set(), ""
    with start_server(**options) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        headers = [{"authorization": f"Bearer {key}"} for key in KEYS]
        for _ in range(8):  # on a busy machine the first stream may have ended before the second begins
            with (
                http.stream("POST", "/v1/completions", json=body, headers=headers[0]) as first,
                http.stream("POST", "/v1/completions", json=body, headers=headers[1]) as second,
            ):
                assert first.status_code == second.status_code == 200
                next(first.iter_lines()), next(second.iter_lines())
                text = http.get("/metrics", headers=headers[0]).text
            seen.add(re.search(r"^aiakq:num_clients\{[^}]*\} (.*)$", text, re.M)[1])
            metrics += text
            if f"{len(KEYS)}.0" in seen:
                break
    assert max(seen) == f"{clients}.0"
    assert not any(digest in metrics for key in KEYS for digest in (key, Keys([key]).owner(key)[:16]))
