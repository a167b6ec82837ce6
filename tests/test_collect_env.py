"""collect-env: it prints everything that a bug report needs and no secrets, and never fails."""

import json
import subprocess

from aiakq import collect_env

SECTIONS = {"versions", "system", "processor", "topology", "memory", "kernels", "gpus", "environment", "caches"}


def test_the_document_holds_every_section(process):
    ended = process("collect-env", "--json")
    assert ended.code == 0 and ended.err == ""
    document = json.loads(ended.out)
    assert set(document) == SECTIONS | {"schema_version", "kind"}
    assert document["kind"] == "collect-env"
    assert document["versions"]["torch"][0].isdigit()
    assert document["topology"]["threads of a process"] == 1
    assert not [name for name, section in document.items() if str(section).startswith("unknown")]


def test_the_text_holds_the_same_lines(process):
    ended = process("collect-env", NCCL_DEBUG="INFO")
    assert ended.code == 0 and ended.err == ""
    assert SECTIONS <= set(ended.out.splitlines())
    assert "  NCCL_DEBUG: INFO" in ended.out.splitlines()


def test_a_broken_configuration_does_not_keep_it_from_answering(process):
    assert process("collect-env", AIAKQ_CONFIG="/no/such/file", AIAKQ_JSON="banana").code == 0


def test_secrets_are_only_reported_as_set(process):
    secrets = {
        "HF_TOKEN": "hf_hidden1",
        "AIAKQ_API_KEY": "hidden2",
        "RAY_REDIS_PASSWORD": "hidden3",
        "HF_ENDPOINT": "https://someone:hidden4@mirror.example/path?token=hidden5&x=1",
    }
    for words in ((), ("--json",)):
        assert "hidden" not in process("collect-env", *words, **secrets).out
    shown = collect_env.shown_variables(
        {**secrets, "HF_HOME": "/data", "HOME": "/home/x", "HUGGING_FACE_HUB_TOKEN": ""}
    )
    assert shown == {
        "AIAKQ_API_KEY": "set",
        "HF_ENDPOINT": "https://...@mirror.example/path?token=...&x=1",
        "HF_HOME": "/data",
        "HF_TOKEN": "set",
        "HUGGING_FACE_HUB_TOKEN": "empty",
        "RAY_REDIS_PASSWORD": "set",
    }


def test_missing_data_is_reported(monkeypatch):
    def broken(*words, **options):
        raise subprocess.TimeoutExpired(["nvidia-smi"], 10)

    monkeypatch.setattr(collect_env.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(collect_env.subprocess, "run", broken)
    monkeypatch.setattr(collect_env, "PACKAGES", ("torch", "no-such-package"))
    document = collect_env.collect()
    assert document["gpus"].startswith("unknown (TimeoutExpired")
    assert document["versions"]["no-such-package"] == "not installed"
    assert "  unknown (TimeoutExpired" in collect_env.text(document)


def test_topology_says_where_ranks_would_run(monkeypatch):
    nodes = [[0, 1, 2, 3], [8, 9, 10, 12]]
    monkeypatch.setattr(collect_env, "cpu_nodes", lambda: nodes)
    monkeypatch.setattr(collect_env, "cpu_shares", lambda size: nodes if size == 2 else [[] for _ in range(size)])
    found = collect_env.topology()
    assert found["nodes"] == {"node 0": "0-3", "node 1": "8-10,12"}
    assert found["ranks"] == {"1 rank": "not bound", "2 ranks": "0-3; 8-10,12"}
