"""Child processes: how they start, and how their end is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from aiakq.errors import WORKER, AiakqError, error
from aiakq.system.channel import Channel, Disconnected
from aiakq.system.child import (
    Child,
    child_command,
    follow,
    run_for_parent,
    without_stderr,
)


class Text(msgspec.Struct, tag="text"):
    text: str


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


#: Says that it has started, then waits for the end of its first socket.
READY = """
import os, socket, sys
from aiakq.system.child import begin_child
begin_child()
first = socket.socket(fileno=int(sys.argv[-1]))
first.sendall(repr(sorted(map(int, os.listdir("/proc/self/fd")))[:-1]).encode())
first.recv(1)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """``start(code, ...)`` starts a child, which is ended after the test."""
    started: list[Child] = []

    def new(code: str, *words: object, **options) -> Child:
        started.append(Child(child_command(code, *words), **options))
        return started[-1]

    yield new
    for child in started:
        child.kill()
        child.end()
        child.close()


def test_a_child_has_its_words_its_threads_and_a_process_group(start):
    code = "import os, socket, sys; text = repr((sys.argv[1:-1], os.environ['OMP_NUM_THREADS'], os.getpgrp()))\n"
    code += "socket.socket(fileno=int(sys.argv[-1])).sendall(text.encode())"
    child = start(code, "more", threads=3)
    assert child.sockets[0].recv(1 << 10).decode() == repr((["more"], "3", child.pid))
    assert child.exit_reason() == "it ended with exit code 0"


def test_an_end_by_a_real_time_signal_is_described(start):
    child = start(READY)
    child.sockets[0].recv(1 << 10)
    os.kill(child.pid, signal.SIGRTMIN + 3)
    assert child.exit_reason() == f"it was ended by signal {signal.SIGRTMIN + 3}"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_child_inherits_its_sockets_and_what_it_is_given_only(start):
    before = os.listdir("/proc/self/fd")
    with open(os.devnull) as given, open(os.devnull) as other:
        child = start(READY, num_sockets=3, pass_fds=[given.fileno()])
        assert not os.get_inheritable(other.fileno()) and not os.get_inheritable(child.sockets[0].fileno())
        numbers = eval(child.sockets[-1].recv(1 << 10))
        assert len(numbers) == 3 + 3 + 1 and given.fileno() in numbers
    child.sockets[-1].close()
    child.end(10.0)
    assert child.process.returncode == 0
    child.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_child_that_cannot_be_started_leaves_no_descriptors():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        Child(["/no/such/program"], num_sockets=2, keep_output=True)
    assert os.listdir("/proc/self/fd") == before


def test_signals_from_the_terminal_do_not_end_a_child_and_the_end_of_its_socket_does(start):
    child = start(READY)
    child.sockets[0].recv(1 << 10)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(child.pid, number)
    time.sleep(0.1)
    assert child.process.poll() is None and os.getpgid(child.pid) != os.getpgid(0)
    child.sockets[0].close()
    child.end(10.0)
    assert child.process.returncode == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_that_hangs_is_killed_with_its_own_children_and_reaped(start, stopped):
    child = start(
        "import os, subprocess, sys, time; print(file=sys.stderr);"
        "p = subprocess.Popen(['sleep', '600']); os.write(int(sys.argv[1]), str(p.pid).encode()); time.sleep(600)"
    )
    grandchild = int(child.sockets[0].recv(100))
    if stopped:
        child.process.send_signal(signal.SIGSTOP)
    assert child.exit_reason(0.1) == "it closed its socket"
    child.end(0.05)
    assert child.exit_reason() == "it was ended by SIGKILL" and not psutil.pid_exists(child.pid)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_event_loop_waits_for_the_end_without_blocking(start):
    async def whole() -> None:
        child, ticks = start("import time; time.sleep(600)"), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        assert not await child.exited(0.1) and ticks > 3
        await child.end_soon(0.05)
        assert child.process.returncode == -signal.SIGKILL and await child.exited(0)
        ticking.cancel()

    asyncio.run(whole())


def test_the_last_line_of_a_child_is_the_reason_if_its_output_is_kept(start, capfd):
    child = start("print('noise'); raise SystemExit('no such model')", keep_output=True)
    assert child.exit_reason(30) == "no such model"
    assert start("import os; os.abort()", keep_output=True).exit_reason(30) == "it was ended by SIGABRT"
    assert start("print('x' * 10**6)", keep_output=True).exit_reason(30) == "x" * 300
    assert capfd.readouterr() == ("", "")


def test_a_child_ends_with_a_killed_parent():
    """Also while it is stopped, when it cannot notice that its socket closed."""
    code = f"""
import signal
from aiakq.system.child import *
child = Child(child_command({READY!r}))
child.sockets[0].recv(100)
child.process.send_signal(signal.SIGSTOP)
print(child.pid, flush=True)
child.sockets[0].recv(100)
"""
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process_failures
@pytest.mark.parametrize(
    ("failure", "id", "has_traceback"),
    [
        (error("no_tokenizer"), "no_tokenizer", False),
        (MemoryError(), "out_of_memory", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes"), "out_of_memory", False),
        (ConnectionResetError("a mirror of the hub hung up"), "engine_dead", True),
        (KeyboardInterrupt(), "engine_dead", True),
    ],
    ids=repr,
)
def test_the_parent_receives_the_error_of_a_child(sockets, capfd, failure, id, has_traceback):
    ours, theirs = (Channel(sock, Text) for sock in sockets)

    def work(first: Text) -> None:
        raise failure

    ours.send(Text("go"))
    code = run_for_parent(theirs, Text, work, lambda first, reason: error("engine_dead", reason=first.text + reason))
    with pytest.raises(AiakqError) as caught:
        ours.receive(5)
    assert caught.value.id == id and code == caught.value.exit_code
    assert ("Traceback" in capfd.readouterr().err) == has_traceback
    if id == "engine_dead":
        assert code == WORKER and f"go{type(failure).__name__}" in str(caught.value)


@pytest.mark.parametrize("failure", [Disconnected(), error("no_tokenizer"), None])
def test_a_child_whose_parent_is_gone_ends_quietly(sockets, capfd, failure):
    ours, theirs = sockets
    Channel[Text, Text](ours, Text).send(Text("go"))
    ours.close()

    def work(first: Text) -> None:
        if failure is not None:
            raise failure

    code = run_for_parent(Channel(theirs, Text), Text, work, lambda first, reason: error("engine_dead", reason=reason))
    assert code == (failure.exit_code if isinstance(failure, AiakqError) else 0) and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "it ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("channel.send_failure(error('engine_dead', reason='a'))", "a"),
        (
            "channel.send_bytes(bytes([0, 0, 0, 1, 0xc1])); import time; time.sleep(60)",
            "it sent data that cannot be read",
        ),
        ("channel.send_bytes(bytes([0, 0]))", "it ended with exit code 0"),
    ],
)
def test_a_parent_that_follows_a_child_learns_why_it_ended(start, code, reason):
    child = start(
        "from aiakq.errors import error; from aiakq.system.child import *; from aiakq.system.channel import *;"
        "import msgspec; Text = msgspec.defstruct('Text', [('text', str)], tag='text');"
        f"channel = Channel(parent_socket(), Text); channel.send(Text('first')); {code}"
    )
    received: list[Text] = []
    failure = follow(
        child, Channel(child.sockets[0], Text), received.append, lambda reason: error("engine_dead", reason=reason)
    )
    assert received == [Text("first")] and failure.id == "engine_dead" and f": {reason}" in str(failure)


def test_what_libraries_write_to_the_standard_error_is_discarded(capfd):
    with pytest.raises(ValueError), without_stderr():
        os.write(2, b"from C")
        raise ValueError
    os.write(2, b"afterwards")
    assert capfd.readouterr().err == "afterwards"
