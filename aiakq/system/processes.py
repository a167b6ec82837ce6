"""Child processes: their start, their initialization, and their exit."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypedDict

from aiakq.system.threads import spin_briefly

_PR_SET_PDEATHSIG = 1
_STDERR = 2


class _ChildOptions(TypedDict):
    stdin: int
    stdout: int
    process_group: int


#: Arguments of ``Popen``: output of libraries goes to standard error, and Ctrl-C reaches only the parent.
CHILD_OPTIONS: _ChildOptions = {"stdin": subprocess.DEVNULL, "stdout": _STDERR, "process_group": 0}


def child_command(code: str, *words: object) -> list[str]:
    """Return the command that runs ``code`` with the arguments ``words`` in this interpreter.

    The current folder is not on its import path, so that a file in it cannot shadow a library.
    """
    return [sys.executable, "-P", "-c", code, *map(str, words)]


def start_child(
    code: str,
    *words: object,
    pass_fds: Sequence[int],
    threads: int,
    environment: Mapping[str, str] = os.environ,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process with ``child_command`` and ``threads`` compute threads. Raises OSError."""
    own = {**environment, "OMP_NUM_THREADS": str(threads)}
    spin_briefly(own)
    options = CHILD_OPTIONS | {"stdin": stdin}
    return subprocess.Popen(child_command(code, *words), pass_fds=pass_fds, env=own, **options)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP for example."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


class ChildProcess:
    """A child process and a socket to it. The descriptor of the child's end is its first argument.

    socket  the parent's end of the socket.
    pid     id of the child process.
    """

    def __init__(self, code: str, threads: int, pass_fds: Sequence[int] = ()) -> None:
        """Start the process with ``start_child``; it also inherits ``pass_fds``. Raises OSError."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            descriptors = (theirs.fileno(), *pass_fds)
            self._process = start_child(code, theirs.fileno(), pass_fds=descriptors, threads=threads)
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()

    def end(self) -> None:
        """Wait for the process to exit after its socket was shut down, and kill it if it does not."""
        end_child(self._process)

    def exit_reason(self) -> str:
        """Return a description of why the process exited."""
        return exit_reason(self._process)


def begin_child() -> None:
    """Initialize a child process: it ignores signals and ends with its parent."""
    # Ctrl-C in a terminal and a service manager's SIGTERM also reach this process, but only the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    end_with_parent()


def exit_child(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, in which torch's thread pools occasionally hang."""
    sys.stderr.flush()
    os._exit(code)


def end_child(process: subprocess.Popen[bytes], seconds: float = 2.0) -> None:
    """Wait for a process that was asked to exit, and kill it if it does not within ``seconds``."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_reason(process: subprocess.Popen[bytes], seconds: float = 5.0) -> str:
    """Return a description of why a process exited, after its socket closed. Waits for its exit up to ``seconds``."""
    try:
        return describe_exit(process.wait(seconds))
    except subprocess.TimeoutExpired:
        return "it closed its socket"


def describe_exit(code: int) -> str:
    """Return a description of the exit code of ``Popen.wait``."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"it was ended by signal {-code}"


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, on Linux only.

    On other systems this does nothing. The parent is the thread that started this process, which must stay alive.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent has just exited
        os._exit(0)
