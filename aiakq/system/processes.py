"""Child processes: how they start, what they do first, and how they end."""

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


#: Arguments of ``Popen``: output of libraries must not mix with our own standard output, and Ctrl-C reaches only the
#: parent.
CHILD_OPTIONS: _ChildOptions = {"stdin": subprocess.DEVNULL, "stdout": _STDERR, "process_group": 0}


def child_command(code: str, *words: object) -> list[str]:
    """The command of a process of this interpreter that runs ``code`` with the arguments ``words``.

    The current folder is not on its import path, so that no file there can shadow a library.
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
    """Start a process as ``child_command`` says, with ``threads`` threads that compute. Raises OSError."""
    own = {**environment, "OMP_NUM_THREADS": str(threads)}
    spin_briefly(own)
    options = CHILD_OPTIONS | {"stdin": stdin}
    return subprocess.Popen(child_command(code, *words), pass_fds=pass_fds, env=own, **options)


class ChildProcess:
    """A child process and a socket to it. The number of the process's own end is its first argument.

    socket  this end.
    pid     of the process.
    """

    def __init__(self, code: str, threads: int, pass_fds: Sequence[int] = ()) -> None:
        """Start it as ``start_child`` does; it inherits ``pass_fds`` too. Raises OSError."""
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
        """End it at once, whatever it does."""
        self._process.kill()

    def end(self) -> None:
        """Wait for its end, its socket being shut down, and kill it if it does not come."""
        end_child(self._process)

    def exit_reason(self) -> str:
        """Why it ended, in words."""
        return exit_reason(self._process)


def begin_child() -> None:
    """What a child process does first: it leaves signals to its parent, and ends with it."""
    # Ctrl-C in a terminal and a service manager's TERM also reach this process; only the parent acts on them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    end_with_parent()


def exit_child(code: int) -> NoReturn:
    """End this process without the interpreter's tear-down, where thread pools of torch now and then hang."""
    sys.stderr.flush()
    os._exit(code)


def end_child(process: subprocess.Popen[bytes], seconds: float = 2.0) -> None:
    """Wait for the end of a process that has been asked to end, and kill it if it does not come."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_reason(process: subprocess.Popen[bytes], seconds: float = 5.0) -> str:
    """Why a process whose socket is closed ended, in words. Waits for its end for so many ``seconds``."""
    try:
        return describe_exit(process.wait(seconds))
    except subprocess.TimeoutExpired:
        return "it closed its socket"


def describe_exit(code: int) -> str:
    """Why a process ended, in words; ``code`` is that of ``Popen.wait``."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"it was ended by signal {-code}"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever it is doing. Only Linux can.

    On other systems this does nothing. The parent is the thread that started this process: it must not end earlier.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has just ended
        os._exit(0)
