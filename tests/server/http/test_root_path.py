"""The path prefix under which a proxy serves the server."""

from __future__ import annotations

import httpx
import pytest

from aiakq.server.http.root_path import route_path


@pytest.mark.parametrize(
    ("path", "root", "found"),
    [
        ("/health", "", "/health"),
        ("/a/b/health", "/a/b", "/health"),
        ("/a/b/health", "/a/b/", "/health"),
        ("/health", "/a/b", "/health"),
        ("/a/bhealth", "/a/b", "/a/bhealth"),
        ("/a/b", "/a/b", "/"),
        ("/a/b/", "/a/b", "/"),
    ],
)
def test_a_root_path_is_removed_if_the_proxy_left_it(path, root, found):
    assert route_path(path, root) == found


def test_open_routes_need_no_key_under_the_root_path_either(start_server):
    with start_server(root_path="/llm", api_key=["secret"], num_gpu_blocks_override=65) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            for prefix in ("", "/llm"):
                for path in ("/health", "/live", "/ready", "/ping", "/version"):
                    assert client.get(prefix + path).status_code == 200
                assert client.get(f"{prefix}/v1/models").status_code == 401
                key = {"authorization": "Bearer secret"}
                assert client.get(f"{prefix}/v1/models", headers=key).status_code == 200
            assert client.get("/llmhealth").status_code == 401
