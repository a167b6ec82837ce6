"""Models that are not available locally: errors come at once, and an unreachable hub does not block for minutes."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from aiakq.errors import AiakqError
from aiakq.formats import hub


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)


def test_a_hub_that_does_not_answer_leaves_the_cache(online, monkeypatch, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert not hub.hub_answers()
        with pytest.raises(AiakqError, match="it does not answer, and the model is not in the cache"):
            hub.resolve_model("org/name", cache=str(tmp_path))
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **given: asked.append(given) or str(tmp_path)
    )
    assert hub.resolve_model("org/name") == tmp_path
    assert asked[0]["local_files_only"] is True


def test_a_hub_that_responds_is_used(online, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.hub_answers()


def test_offline_and_proxies_are_left_to_the_client(monkeypatch):
    assert hub.hub_answers()  # tests run offline
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert hub.hub_answers()


def test_the_neighbours_of_a_missing_folder_are_listed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "real").mkdir(parents=True)
    assert hub.what_is_here("out/real") is None
    Path("out/model.gguf").touch()
    assert hub.what_is_here("out/model.gguf") is hub.what_is_here("out/real:Q8_0") is None
    assert hub.what_is_here("s3://bucket/model") is None
    Path("out/model.gguf").unlink()
    assert hub.what_is_here("out/nope") == "There is no folder out/nope here; out contains real. Looking on the hub."
    assert hub.what_is_here("org/name") == "There is no folder org/name here. Looking on the hub."
    said = []
    monkeypatch.setattr(hub, "announce", said.append)
    with pytest.raises(AiakqError):
        hub.resolve_model("out/nope")
    assert len(said) == 1 and "out contains real" in said[0]
