"""Child processes: how they start, and how their end is told."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from aiakq.system.processes import describe_exit, end_child, exit_reason, start_child

WAIT = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_child_has_its_threads_its_descriptors_and_a_process_group(sockets):
    ours, theirs = sockets
    code = "import os, socket, sys; text = repr((sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.getpgrp()))\n"
    code += "socket.socket(fileno=int(sys.argv[1])).sendall(text.encode())"
    child = start_child(code, theirs.fileno(), "more", pass_fds=[theirs.fileno()], threads=3)
    found = ours.recv(1 << 10).decode()
    assert found == repr(([str(theirs.fileno()), "more"], "3", child.pid))
    assert child.wait(5) == 0 and exit_reason(child) == "it ended with exit code 0"


def test_a_child_that_does_not_end_is_killed(sockets):
    _, theirs = sockets
    child = start_child(WAIT, theirs.fileno(), pass_fds=[theirs.fileno()], threads=1)
    assert exit_reason(child, 0.1) == "it closed its socket"
    end_child(child, 0.1)
    assert exit_reason(child) == "it was ended by SIGKILL"


def test_an_end_by_a_real_time_signal_is_described(sockets):
    _, theirs = sockets
    child = start_child(WAIT, theirs.fileno(), pass_fds=[theirs.fileno()], threads=1)
    os.kill(child.pid, signal.SIGRTMIN + 3)
    assert exit_reason(child) == f"it was ended by signal {signal.SIGRTMIN + 3}"
    assert describe_exit(3) == "it ended with exit code 3"
