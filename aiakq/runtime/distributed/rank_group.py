"""RankGroup: starts the other ranks of a tensor-parallel group, sends them what rank 0 decides, and notices their
end.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import folder_identity
from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Channel,
    Configure,
    FromRank,
    Load,
    RankFailed,
    RankLoaded,
    RankReady,
    ToRank,
    frame,
)
from aiakq.system.threads import spin_briefly
from aiakq.system.topology import cpu_shares

_STDERR = 2
#: Seconds that a rank may take to load the model, or to set up its cache.
LOAD_SECONDS = 1800.0
#: ``-P`` keeps the current folder off the child's import path, so that no file there can shadow a library.
_COMMAND = ("-P", "-c", "from aiakq.runtime.loader.rank_process import main; main()")


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """The other ranks of ``config``, loading; None if there are none. Raises ``ranks_unavailable``, ``rank_failed``."""
    parallel = config.parallel
    if parallel.tensor_parallel_size == 1:
        return None
    if config.device.device.type != "cpu":
        raise error("ranks_unavailable", reason="they share the memory of a CPU, and the device is a GPU")
    return RankGroup(parallel.arguments, parallel.tensor_parallel_size, parallel.timeout)


def checkpoint_digest(config: EngineConfig) -> str:
    """Equal for ranks that load the same files."""
    files = sorted((name, size) for name, (_, _, size, _) in folder_identity(config.load.path).items())
    return hashlib.sha256(repr((files, sorted(config.model.raw.items(), key=str))).encode()).hexdigest()


class RankGroup:
    """Ranks 1 and up as child processes, seen from rank 0. Until it is closed, this process has a rank's share of the
    threads, and the thread that makes it a rank's processors.

    collective  rank 0's part in what they compute together.
    """

    def __init__(self, arguments: Mapping[str, Any], size: int, time_limit: float) -> None:
        """Start them loading. Raises ``ranks_unavailable`` and ``rank_failed``."""
        reason = library.unavailable()
        if reason is not None or not hasattr(os, "memfd_create"):
            raise error("ranks_unavailable", reason=reason or "they share memory in a way that only Linux has")
        self.size = size
        self._threads_before, self._cpus_before = torch.get_num_threads(), os.sched_getaffinity(0)
        self._thread = threading.get_native_id()
        self.threads = max(1, self._threads_before // size)
        self._arrived: queue.SimpleQueue[tuple[int, FromRank | None]] = queue.SimpleQueue()
        self._failure: AiakqError | None = None
        self._closing = False
        self._ranks: list[_Rank] = []
        cpus, count = cpu_shares(size), memory_bytes(size)
        memory = os.memfd_create("aiakq-ranks")
        try:
            os.ftruncate(memory, count)
            self.collective = NativeCollective(mmap.mmap(memory, count), 0, size, time_limit)
            for rank in range(1, size):
                load = Load(dict(arguments), rank, size, memory, self.threads, cpus[rank], time_limit)
                self._ranks.append(_Rank(load, self._arrived, self._note_end))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
        torch.set_num_threads(self.threads)
        if cpus[0]:
            os.sched_setaffinity(self._thread, cpus[0])

    def wait_loaded(self, checkpoint: str) -> None:
        """Wait until every rank has loaded the same ``checkpoint``. Raises the error that kept one from it."""
        for rank, message in self._answers(RankLoaded, LOAD_SECONDS, "load the model"):
            assert isinstance(message, RankLoaded)
            if (message.version, message.checkpoint) != (version("aiakq"), checkpoint):
                raise error("rank_failed", rank=rank, reason="it has loaded other files, or is another version")

    def configure(self, record: Configure) -> None:
        """Have the ranks set up their caches, and wait until they have."""
        self.send(record)
        self._answers(RankReady, LOAD_SECONDS, "set up its cache")

    def send(self, record: ToRank) -> None:
        """Send a record to every rank."""
        data = frame(record)
        for rank in self._ranks:
            try:
                rank.channel.send(data)
            except BlockingIOError:  # it has not read for so long
                self._failure = self._failure or self._late(rank.number, "the next step")
                self.check()
            except OSError:
                self.check(gone=rank.number)

    def abandon_step(self) -> None:
        """Have every rank forget the last step that was sent, even if it has begun."""
        self.collective.interrupt()
        self.send(Abandon())
        self._answers(Abandoned, LOAD_SECONDS, "abandon a step")
        self.collective.start_over()

    def check(self, gone: int | None = None) -> None:
        """End the ranks and raise ``rank_failed`` or ``rank_late`` if they cannot go on.

        gone  a rank that cannot be reached.
        """
        if gone is not None and self._failure is None:
            self._ranks[gone - 1].reader.join(5.0)  # it knows why
        if self._failure is None and gone is not None:
            self._failure = error("rank_failed", rank=gone, reason="it closed its socket")
        if self._failure is None and self.collective.late_rank is not None:
            self._failure = self._late(self.collective.late_rank, f"gather {self.collective.num_meetings}")
        if self._failure is not None:
            for rank in self._ranks:  # they are of no use any more, and one that hangs ends in no other way
                rank.process.kill()
            raise self._failure

    def close(self) -> None:
        """End the other ranks. Later calls do nothing."""
        if self._closing:
            return
        self._closing = True
        self.collective.give_up()
        for rank in self._ranks:
            rank.end()
        torch.set_num_threads(self._threads_before)
        with contextlib.suppress(OSError):  # that thread has ended
            os.sched_setaffinity(self._thread, self._cpus_before)

    def _late(self, rank: int, place: str) -> AiakqError:
        return error("rank_late", rank=rank, limit=self.collective.time_limit, place=place)

    def _answers(self, kind: type[FromRank], limit: float, what: str) -> list[tuple[int, FromRank]]:
        """One message of ``kind`` from every rank; others are dropped."""
        missing, found = set(range(1, self.size)), []
        while missing:
            try:
                rank, message = self._arrived.get(timeout=limit)
            except queue.Empty:
                rank = min(missing)
                self._failure = error("rank_late", rank=rank, limit=limit, place=f"the end of its work to {what}")
                raise self._failure from None
            if message is None:
                self.check(gone=rank)
            if isinstance(message, kind):
                missing.discard(rank)
                found.append((rank, message))
        return found

    def _note_end(self, rank: _Rank, failure: AiakqError) -> None:
        """Called by the thread that reads from a rank, when that has ended."""
        if not self._closing:
            self._failure = self._failure or failure
            self.collective.give_up()
        self._arrived.put((rank.number, None))


class _Rank:
    """One child process, and the thread that reads from it: messages go to ``arrived``, its end to ``on_end``."""

    def __init__(
        self,
        load: Load,
        arrived: queue.SimpleQueue[tuple[int, FromRank | None]],
        on_end: Callable[[_Rank, AiakqError], None],
    ) -> None:
        """Start the process. Raises ``rank_failed``."""
        self.number = load.rank
        self._arrived, self._on_end = arrived, on_end
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {**os.environ, "OMP_NUM_THREADS": str(load.threads)}
        spin_briefly(environment)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_COMMAND, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), load.memory),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # output of libraries must not mix with our own standard output
                process_group=0,  # Ctrl-C reaches only the parent
            )
        except OSError as failure:
            ours.close()
            raise error("rank_failed", rank=load.rank, reason=f"it could not be started: {failure}") from None
        finally:
            theirs.close()
        seconds, rest = divmod(load.time_limit, 1.0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self.channel = Channel(ours)
        self.channel.send(frame(load))
        self.reader = threading.Thread(target=self._read, name=f"rank-{load.rank}", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        failure: AiakqError | None = None
        while (message := self.channel.receive_from_rank()) is not None:
            if isinstance(message, RankFailed):
                failure = error(message.id, **message.fields)
            else:
                self._arrived.put((self.number, message))
        self._on_end(self, failure or error("rank_failed", rank=self.number, reason=self._exit_reason()))

    def _exit_reason(self) -> str:
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if code >= 0:
            return f"it ended with exit code {code}"
        return f"it was ended by {signal.Signals(-code).name}"

    def end(self) -> None:
        """End the process: it ends when the socket is closed, and is killed if it does not."""
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(5.0)
        self.channel.socket.close()
