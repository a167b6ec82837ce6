"""Systems other than Linux: unsupported features fail with one sentence, the rest works."""

from __future__ import annotations

import resource
import sys

import pytest

from aiakq.kernels.cpu import build
from aiakq.system import memory
from aiakq.terminal import console


def test_windows_gets_one_sentence(aiakq, monkeypatch):
    monkeypatch.setattr("aiakq.cli.WINDOWS", True)
    ended = aiakq("serve", "model")
    assert ended.code == 7 and ended.err.count("\n") == 1
    assert "aiakq does not run on Windows. Use Linux; on Windows, that is WSL 2." in ended.err


@pytest.mark.parametrize("name", ["resource", "fcntl"])
def test_a_missing_module_of_posix_is_no_bug(aiakq, monkeypatch, name):
    def run(words, debug):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("aiakq.cli._run", run)
    ended = aiakq("serve", "model")
    assert ended.code == 7 and "error[system_unsupported]" in ended.err and "bug" not in ended.err


def test_without_proc_memory_is_not_limited_instead_of_failing(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(memory, "_SIZE", str(tmp_path / "statm"))
    assert memory.limit_more_memory(1 << 30) is False and limits == []
    (tmp_path / "statm").write_text("100 50 0 0 0 0 0\n")
    assert memory.limit_more_memory(1 << 30) is True and len(limits) == 1


def test_peak_memory_is_in_bytes_everywhere(monkeypatch):
    usage = type("Usage", (), {"ru_maxrss": 2048})
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert memory.peak_memory_bytes() == 2048 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.peak_memory_bytes() == 2048


def test_missing_native_kernels_are_named_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "TARGET", tmp_path / "absent.so")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    console.note_missing_kernels(environment)
    console.note_missing_kernels(environment)
    console.note_missing_kernels({"AIAKQ_CPU_LIBRARY": "other.so"})
    assert capsys.readouterr().err.count("No native CPU kernels were built at installation") == 1
