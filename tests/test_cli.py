"""The program around the commands: bugs, signals, closed streams, stdout and stderr."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from aiakq import cli
from aiakq.errors import BUG

#: The message of torch's CPU allocator in a RuntimeError.
ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 67117056 bytes. Error code 12"


@pytest.mark.process_failures
def test_a_bug_is_one_line_and_debug_shows_the_traceback(aiakq, monkeypatch):
    def broken(words, debug):
        raise KeyError("lost")

    monkeypatch.setattr(cli, "_run", broken)
    ended = aiakq("inspect", "x")
    assert ended.code == BUG
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("aiakq: error[bug]: This is a bug in aiakq: KeyError: 'lost' (")
    assert "--debug" in ended.err
    for words in (("--debug", "inspect", "x"), ("inspect", "x", "--debug")):
        shown = aiakq(*words)
        assert "Traceback" in shown.err and shown.last == ended.last
    monkeypatch.setenv("AIAKQ_DEBUG", "1")
    assert "Traceback" in aiakq("inspect", "x").err


@pytest.mark.parametrize(
    ("problem", "code", "id"),
    [
        (MemoryError(), 5, "out_of_memory"),
        (RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {ALLOCATOR}"), 5, "out_of_memory"),
        (OSError(28, "No space left on device", "/somewhere/file"), 5, "output_failed"),
    ],
)
def test_failures_of_the_machine_are_errors_not_bugs(aiakq, monkeypatch, problem, code, id):
    def failing(words, debug):
        raise problem

    monkeypatch.setattr(cli, "_run", failing)
    ended = aiakq("inspect", "x")
    assert ended.code == code and f"error[{id}]" in ended.err


def test_an_error_is_one_line_whatever_the_user_put_into_it(aiakq):
    ended = aiakq("inspect", "no/such/\x1b[31mfolder\nwith lines")
    assert ended.code == 3
    assert ended.err.count("\n") == 1 and "\x1b" not in ended.err
    assert r"\x1b[31mfolder" in ended.err


def test_tables_and_documents_go_to_stdout(process, example_model):
    ended = process("inspect", example_model)
    assert ended.code == 0 and ended.err == "" and "LlamaForCausalLM" in ended.out
    ended = process("inspect", example_model, "--json")
    assert json.loads(ended.out)["architecture"] == "LlamaForCausalLM"


def test_no_color_without_a_terminal_and_none_with_no_color(aiakq, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in aiakq("inspect", "none/../x").err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31merror[model_missing]" in aiakq("inspect", "none/../x").err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in aiakq("inspect", "none/../x").err


def test_help_is_a_command_too(aiakq):
    assert aiakq("help", "inspect").out == aiakq("inspect", "--help").out != aiakq("help").out
    assert aiakq("help", "bench", "latency").out.startswith("Usage: aiakq bench latency")
    assert aiakq("help").out == aiakq().out
    assert aiakq("-V").out == aiakq("--version").out == aiakq("version").out


def shell(program, example_model, text: str) -> subprocess.CompletedProcess[str]:
    command = text.format(aiakq=program, model=example_model)
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)


def test_a_reader_that_leaves_ends_the_program_silently(program, example_model):
    done = shell(program, example_model, "{aiakq} inspect {model} --json 2>/dev/null | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() in ("141", "0") and done.stderr == ""
    done = shell(program, example_model, "{aiakq} quantize --help | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() in ("141", "0") and done.stderr == ""


def test_output_that_cannot_be_written_is_an_error(program, example_model):
    for target in (">/dev/full", ">&-"):
        done = shell(program, example_model, f"{{aiakq}} inspect {{model}} --json {target}")
        assert done.returncode == 5
        assert done.stderr.splitlines()[-1].startswith("aiakq: error[output_failed]: Writing 'standard output' failed")


def test_messages_that_cannot_be_written_do_not_stop_the_work(program, example_model):
    for target in ("2>/dev/full", "2>&-"):
        done = shell(program, example_model, f"{{aiakq}} inspect {{model}} --json {target}")
        assert done.returncode == 0 and json.loads(done.stdout)["kind"] == "inspect"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=lambda value: str(value))
def test_a_signal_ends_quantize_and_leaves_nothing_behind(program, example_model, tmp_path, sent, code):
    words = [program, "quantize", "-i", example_model, "-o", tmp_path / "out", "-quant_type", "awq", "--samples", "16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True, env=environment)
    for line in running.stderr:
        if "quantize 0/6" in line:
            break
    time.sleep(0.2)
    running.send_signal(sent)
    rest = running.stderr.read()
    assert running.wait(60) == code
    assert rest.splitlines()[-1] in ("aiakq: interrupted", "aiakq: terminated")
    assert list(tmp_path.iterdir()) == []


def test_a_document_is_written_whole_where_writes_do_a_part(monkeypatch):
    """As to a pipe, unbuffered, when a signal comes in between."""
    from aiakq.terminal import console

    class Part(io.RawIOBase):
        written = b""

        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            self.written += bytes(data[:1000])
            return min(len(data), 1000)

    raw = Part()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
    document = {"rows": list(range(2000))}
    console.emit(document)
    assert json.loads(raw.written) == document


def test_a_clone_beside_the_working_folder_is_named(tmp_path):
    """Python takes a folder called aiakq for the package, which then has no version, and no command."""
    (tmp_path / "aiakq").mkdir()
    program = "import sys, runpy; sys.argv = ['aiakq']; runpy.run_path(sys.path.pop(0), run_name='__main__')"
    code = f"import sys; sys.path.insert(0, {cli.__file__.replace('cli.py', '__main__.py')!r}); {program}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert str(tmp_path / "aiakq") in done.stderr and "Traceback" not in done.stderr
