"""Child processes: their start with sockets to this process, their initialization, their errors, and their exit.

A parent starts a ``Child`` and opens a channel (channel.py) over its socket. The child calls ``begin_child``, opens a
channel over ``parent_socket``, and works in ``run_for_parent``, which sends the error that ends it. The parent learns
of an end by that error or by the end of the connection, of which ``exit_reason`` tells the cause; see ``follow``.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol, TypeVar

from aiakq.errors import AiakqError, memory_error, one_line
from aiakq.system.channel import Channel, Disconnected, InvalidMessage, Receive, Send
from aiakq.system.threads import spin_briefly

First = TypeVar("First")

_PR_SET_PDEATHSIG = 1
_STDERR = 2
#: How much of a child's output is searched for its last line, and how much of that is shown.
_LAST_BYTES, _LAST_CHARS = 1 << 16, 300


def child_command(code: str, *words: object) -> list[str]:
    """Return the command that runs ``code`` with the arguments ``words`` in this interpreter.

    The current folder is not on its import path, so that a file in it cannot shadow a library.
    """
    return [sys.executable, "-P", "-c", code, *map(str, words)]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP for example."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


class Process(Protocol):
    """A process at the other end of a channel: a ``Child``, or one on another machine."""

    def kill(self) -> None:
        """Kill the process immediately."""

    def end(self) -> None:
        """Wait for the process to exit after its channel was shut down, and kill it if it does not."""

    def exit_reason(self) -> str:
        """Return why the process exited after its connection ended."""


class Child:
    """A child process and the sockets to it, whose descriptors are its last arguments. It has no other open files.

    sockets  this process's ends of the sockets, for channels to own.
    process  the process, whose id is ``pid``.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        threads: int | None = None,
        num_sockets: int = 1,
        pass_fds: Sequence[int] = (),
        keep_output: bool = False,
    ) -> None:
        """Start the process. Raises OSError.

        command      see ``child_command``.
        environment  its environment variables.
        threads      number of its compute threads, if ``environment`` does not say.
        pass_fds     descriptors that it also inherits.
        keep_output  keep its output in a temporary file, for ``exit_reason``, instead of writing it to standard error.
        """
        if threads is not None:
            own = {**environment, "OMP_NUM_THREADS": str(threads)}
            spin_briefly(own)
            environment = own
        pairs = [socket.socketpair() for _ in range(num_sockets)]
        self.sockets = [ours for ours, _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        self._output = tempfile.TemporaryFile() if keep_output else None
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=self._output or _STDERR,  # output of libraries
                stderr=self._output,
                env=environment,
                pass_fds=(*numbers, *pass_fds),
                process_group=0,  # Ctrl-C reaches only the parent
            )
        except OSError:
            self.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.pid = self.process.pid

    def kill(self) -> None:
        """Kill the process, and those of its children that are in its process group, immediately."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

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
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self.process.returncode is not None

    async def end_soon(self, seconds: float = 2.0) -> None:
        """Like ``end``, without blocking the event loop."""
        if not await self.exited(seconds):
            self.kill()
            await self.exited(math.inf)

    def exit_reason(self, seconds: float | None = 5.0) -> str:
        """Return why the process exited after its socket closed; waits for the exit up to ``seconds``.

        This is the last line of its output if that is kept.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        lines: list[str] = []
        if self._output is not None:
            self._output.seek(max(0, os.fstat(self._output.fileno()).st_size - _LAST_BYTES))
            lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        if lines:
            return lines[-1].strip()[:_LAST_CHARS]
        if code >= 0:
            return f"it ended with exit code {code}"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal
            return f"it was ended by signal {-code}"

    def close(self) -> None:
        """Close the sockets and the file with its output."""
        for sock in self.sockets:
            sock.close()
        if self._output is not None:
            self._output.close()


def follow(
    process: Process,
    channel: Channel[Send, Receive],
    on_record: Callable[[Receive], None],
    failed: Callable[[str], AiakqError],
) -> AiakqError:
    """Pass every record of a process to ``on_record`` until it ends, and return the error that it ended with.

    If it sent none, or data that are no record, this is ``failed(reason)``.
    """
    try:
        while (record := channel.receive()) is not None:
            on_record(record)
    except AiakqError as failure:
        return failure
    except InvalidMessage as problem:
        process.kill()
        return failed(f"it sent data that cannot be read: {problem}")
    except Disconnected:  # while ``on_record`` received what follows a record
        pass
    return failed(process.exit_reason())


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
    channel: Channel[Send, Receive],
    kind: type[First],
    work: Callable[[First], None],
    unexpected: Callable[[First, str], AiakqError],
) -> int:
    """Call ``work`` with the first record, of type ``kind``, and return the exit code of this process.

    The parent receives the error that ``work`` raises. A lack of memory is reported as ``out_of_memory``. Any other
    exception is a bug: its traceback is printed, and the parent receives ``unexpected(record, description)``. If the
    parent is gone, there is nothing to report.
    """
    first = channel.receive()
    if not isinstance(first, kind):  # the parent is gone
        return 0
    try:
        work(first)
    except Disconnected:
        return 0
    except BaseException as failure:
        reported = failure if isinstance(failure, AiakqError) else memory_error(failure)
        if reported is None:
            traceback.print_exc()
            reported = unexpected(first, one_line(failure))
        channel.send_failure(reported)
        return reported.exit_code
    return 0


def exit_child(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, in which torch's thread pools occasionally hang."""
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what is written to the standard error meanwhile, also by C libraries. Of the whole process."""
    sys.stderr.flush()
    kept, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


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
