"""The listening socket."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.server.http.listener import bind, bind_unix, url_of


def test_bind_finds_ports_in_use_and_foreign_addresses():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(listener, "localhost") == f"http://localhost:{port}"
        with pytest.raises(AiakqError) as caught:
            bind("127.0.0.1", port)
        assert caught.value.id == "port_in_use"
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener, "0.0.0.0").startswith("http://127.0.0.1:")
    with pytest.raises(AiakqError) as caught:
        bind("203.0.113.1", 0)
    assert caught.value.id == "bad_option"


def test_bind_to_all_ipv6_addresses():
    try:
        listener = bind("::", 0)
    except AiakqError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener, "::").startswith("http://[::1]:")


def test_a_unix_socket_replaces_one_without_a_listener(tmp_path):
    path = str(tmp_path / "aiakq.sock")
    with bind_unix(path) as listener:
        assert url_of(listener, "127.0.0.1") == f"unix:{path}"
        with pytest.raises(AiakqError) as caught:
            bind_unix(path)
        assert caught.value.id == "bad_option"
    bind_unix(path).close()
    (tmp_path / "file").write_text("kept")
    for wrong in (str(tmp_path / "file"), str(tmp_path / "missing" / "a"), str(tmp_path / ("x" * 200))):
        with pytest.raises(AiakqError, match="--uds"):
            bind_unix(wrong)
    assert (tmp_path / "file").read_text() == "kept"
