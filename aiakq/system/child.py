"""Child processes: their start with sockets to this process, their initialization, their errors, and their exit.

The one way to start a process of this program and talk to it: ``Child`` with a ``Channel`` over its socket, and in the
child ``begin_child``, a ``Channel``, and ``run_for_parent``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypedDict

from aiakq.errors import AiakqError, memory_error, one_line
from aiakq.system.channel import Channel, Disconnected
from aiakq.system.threads import spin_briefly

_PR_SET_PDEATHSIG = 1
_STDERR = 2
#: How much of a child's output is searched for its last line, and how much of that is shown.
_LAST_BYTES, _LAST_CHARS = 1 << 16, 300


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
    own, options = child_environment(threads, environment), CHILD_OPTIONS | {"stdin": stdin}
    return subprocess.Popen(child_command(code, *words), pass_fds=pass_fds, env=own, **options)


def child_environment(threads: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` with ``threads`` compute threads; see threads.py."""
    own = {**environment, "OMP_NUM_THREADS": str(threads)}
    spin_briefly(own)
    return own


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP for example."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


class Child:
    """A child process and the sockets to it, whose descriptors are its last arguments. It has no other open files.

    sockets  this process's ends of the sockets, for channels to own.
    socket   the first of them.
    process  the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        num_sockets: int = 1,
        pass_fds: Sequence[int] = (),
        keep_output: bool = False,
    ) -> None:
        """Start the process. Raises OSError.

        command      see ``child_command``.
        environment  its environment variables; see also ``child_environment``.
        pass_fds     descriptors that it also inherits.
        keep_output  keep its output in a temporary file, for ``exit_reason``, instead of writing it to standard error.
        """
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(num_sockets)]
        self.sockets = [ours for ours, _ in pairs]
        self.socket = self.sockets[0]
        numbers = [theirs.fileno() for _, theirs in pairs]
        self._output = tempfile.TemporaryFile() if keep_output else None
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=self._output or _STDERR,
                stderr=self._output,
                env=environment,
                pass_fds=(*numbers, *pass_fds),
                process_group=0,
            )
        except OSError:
            self.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process is running."""
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        """Send the process a signal. Does nothing if it has exited."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, and those of its children that are in its process group, immediately."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = 2.0) -> None:
        """Wait for the process to exit after its channel was shut down, and kill it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        self.process.wait()

    async def exited(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the process to exit, without blocking the event loop; whether it has."""
        import asyncio  # imported late: every child imports this module

        deadline, pause = time.monotonic() + seconds, 0.001
        while self.process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    async def end_soon(self, seconds: float = 2.0) -> None:
        """Like ``end``, without blocking the event loop."""
        if not await self.exited(seconds):
            self.kill()
            await self.exited(math.inf)

    def exit_reason(self, seconds: float = 5.0) -> str:
        """Return why the process exited after its socket closed; waits for the exit up to ``seconds``.

        This is the last line of its output if that is kept.
        """
        reason = exit_reason(self.process, seconds)
        if self._output is None or self.process.returncode is None:
            return reason
        self._output.seek(max(0, os.fstat(self._output.fileno()).st_size - _LAST_BYTES))
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:_LAST_CHARS] if lines else reason

    def close(self) -> None:
        """Close the sockets and the file with its output."""
        for sock in self.sockets:
            sock.close()
        if self._output is not None:
            self._output.close()


def begin_child() -> None:
    """Initialize a child process: it ignores signals and ends with its parent."""
    # Ctrl-C in a terminal and a service manager's SIGTERM also reach this process, but only the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    end_with_parent()


def parent_socket(index: int = 0) -> socket.socket:
    """Return a socket to the parent, see ``Child``; ``index`` counts this process's arguments."""
    return socket.socket(fileno=int(sys.argv[1 + index]))


def run_for_parent(
    channel: Channel[Any, Any], work: Callable[[], None], unexpected: Callable[[str], AiakqError]
) -> int:
    """Call ``work`` and return the exit code of this process. The parent receives the error that ``work`` raises.

    A lack of memory is reported as ``out_of_memory``. Any other exception is a bug: its traceback is printed, and the
    parent receives ``unexpected(description)``. If the parent is gone, there is nothing to report.
    """
    try:
        try:
            work()
        except (AiakqError, Disconnected):
            raise
        except BaseException as failure:
            if lacking := memory_error(failure):
                raise lacking from None
            traceback.print_exc()
            raise unexpected(one_line(failure)) from None
    except Disconnected:
        return 0
    except AiakqError as failure:
        with contextlib.suppress(Disconnected):
            channel.send_failure(failure)
        return failure.exit_code
    return 0


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
