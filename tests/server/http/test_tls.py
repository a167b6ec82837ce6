"""HTTPS, and clients that show certificates."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest
import trustme

from aiakq.errors import AiakqError

BODY = {"prompt": "Once", "max_tokens": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Certificates of one authority, for the server and for a client."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client@example.org")
    paths = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key", "client")}
    authority.cert_pem.write_to_path(paths["ca"])
    server.private_key_pem.write_to_path(paths["key"])
    for blob in server.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    client.private_key_and_cert_chain_pem.write_to_path(paths["client"])
    return paths


def test_https_with_timeouts(start_server, files):
    with start_server(ssl_certfile=str(files["cert"]), ssl_keyfile=str(files["key"]), header_timeout=0.5) as server:
        assert server.url.startswith("https://") and server.url in server.ready.curl
        trusting = ssl.create_default_context(cafile=files["ca"])
        with httpx.Client(base_url=server.url, verify=trusting, trust_env=False, timeout=60) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
            own = client.get("/v1/models", headers={"origin": server.url})
            assert own.status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url, trust_env=False)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"), trust_env=False)
        # The limits hold behind TLS, too.
        host, port = server.url.removeprefix("https://").split(":")
        with trusting.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as late:
            late.settimeout(10)
            late.sendall(b"GET / HTTP/1.1\r\n")
            assert late.recv(1000).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection((host, int(port))) as silent:
            silent.settimeout(20)
            assert silent.recv(1000) == b"", "a handshake has no more time than headers have"


def test_client_certificates_can_be_required(start_server, files):
    options = {"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "ca"}
    with start_server(**{name: str(files[file]) for name, file in options.items()}, ssl_cert_reqs=2) as server:
        known = ssl.create_default_context(cafile=files["ca"])
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", verify=known, trust_env=False)
        known.load_cert_chain(files["client"])
        assert httpx.get(f"{server.url}/health", verify=known, trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        ({"ssl_keyfile": "key"}, "option_conflict"),
        ({"enable_ssl_refresh": True}, "option_conflict"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 2}, "option_conflict"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "client"}, "bad_option"),
        ({"ssl_certfile": "none"}, "bad_option"),
    ],
    ids=str,
)
def test_unusable_tls_options_are_refused(start_server, files, arguments, id):
    paths = {
        name: str(files.get(value, "no/such/file")) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    with pytest.raises(AiakqError) as caught:
        start_server(**paths)
    assert caught.value.id == id


def _issuer_of(server) -> bytes:
    """The certificate that a new connection gets."""
    host, port = server.url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port))).encode()


def test_a_replaced_certificate_is_used_by_new_connections(start_server, files, tmp_path):
    paths = {name: tmp_path / f"{name}.pem" for name in ("cert", "key")}
    for name, path in paths.items():
        path.write_bytes(files[name].read_bytes())
    options = {"ssl_certfile": str(paths["cert"]), "ssl_keyfile": str(paths["key"]), "enable_ssl_refresh": True}
    with start_server(**options, num_gpu_blocks_override=65) as server:
        old = _issuer_of(server)
        unverified = ssl._create_unverified_context()
        with httpx.Client(base_url=server.url, verify=unverified, trust_env=False) as open_before:
            assert open_before.get("/health").status_code == 200
            fresh = trustme.CA().issue_cert("127.0.0.1")
            # A certificate without its key yet: the old pair stays.
            fresh.cert_chain_pems[0].write_to_path(paths["cert"])
            deadline = time.monotonic() + 30
            while not any("cannot be used" in event.message for event in server.events):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert _issuer_of(server) == old
            fresh.private_key_pem.write_to_path(paths["key"])
            while _issuer_of(server) == old:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert open_before.get("/health").status_code == 200
        assert any("new connections use it" in event.message for event in server.events)
