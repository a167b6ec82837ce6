"""RankGroup: the other ranks as rank 0 sees them. It sends them messages and detects when one has failed.

Rank r belongs to stage r // size. The ranks of a stage share its layers, and the first rank of the last stage samples.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import NoReturn, TypeVar

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import file_sizes
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.distributed.collectives import RankCollective, is_lost
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Configure,
    CountPages,
    FromRank,
    OutOfMemory,
    PagesCounted,
    RankChannel,
    RankLoaded,
    RankReady,
    Results,
    Resume,
    Resumed,
    ToRank,
)
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.protocol.step import StepResult
from aiakq.system.channel import Disconnected, framed
from aiakq.system.child import Process, follow

Answer = TypeVar("Answer", bound=FromRank)
Result = TypeVar("Result")

#: Time limit in seconds for a rank to load the model, or to set up its cache.
LOAD_SECONDS = 1800.0
#: Time limit in seconds for a rank to start.
START_SECONDS = 300.0
#: Reason of ``rank_failed`` where a running step cannot be abandoned.
NO_MEMORY = "it ran out of memory in a step that other ranks have begun"
#: Seconds without a heartbeat after which a rank that is loading is given up, if the time limit of steps is shorter.
SILENT_SECONDS = 60.0


@dataclass(frozen=True)
class Rank:
    """A rank other than 0, as rank 0 sees it: its global rank, its process, and the control connection to it."""

    number: int
    process: Process
    channel: RankChannel


def checkpoint_digest(config: EngineConfig) -> str:
    """Return a digest of the checkpoint's file sizes and config, to check that all ranks load the same files."""
    facts = (file_sizes(config.load.path), sorted(config.model.raw.items(), key=str))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class RankGroup:
    """Ranks 1 and up.

    size        number of ranks per stage.
    num_stages  number of stages.
    threads     number of threads of each rank.
    host_ranks  number of ranks on rank 0's machine.
    collective  collective of the first stage; None if the stage has one rank.
    link        sender of hidden states to the next stage; None if there is one stage.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        size: int,
        threads: int,
        time_limit: float,
        collectives: Sequence[RankCollective],
        link: LinkSender | None,
        on_close: Callable[[], None],
        host_ranks: int | None = None,
    ) -> None:
        """Start a reader thread per rank.

        collectives  collectives that this process can interrupt, the first stage's first.
        on_close     called at the end of ``close``.
        host_ranks   number of ranks on rank 0's machine; None if all ranks are.
        """
        self.size, self.num_stages = size, (len(ranks) + 1) // size
        self.threads, self.host_ranks = threads, host_ranks or len(ranks) + 1
        self.link = link
        self._time_limit = time_limit
        self._collectives = list(collectives)
        self.collective = self._collectives[0] if size > 1 else None
        self._on_close = on_close
        self._arrived: queue.SimpleQueue[tuple[int, FromRank | None]] = queue.SimpleQueue()
        self._failure: AiakqError | None = None
        self._closing = False
        self._ranks = list(ranks)
        self._short: set[int] = (
            set()
        )  # steps in which a rank ran out of memory, reported while an earlier result was awaited
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"rank-{rank.number}", daemon=True) for rank in ranks
        ]
        for rank, reader in zip(ranks, self._readers, strict=True):
            rank.channel.limit_sending(time_limit, partial(self._stall, rank.number))
            reader.start()

    @property
    def share(self) -> ModelShare:
        """The part of the model that rank 0 loads."""
        return ModelShare(self.collective, 0, self.num_stages)

    def describe(self) -> str:
        """Return a description of the ranks for the start-up table."""
        parts = [f"{self.num_stages} stages"] if self.num_stages > 1 else []
        if self.size > 1:
            parts.append(f"{self.size} processes share each layer")
        return "; ".join([*parts, f"threads of each: {self.threads}"])

    # --- starting ---

    def connect(self) -> None:
        """Connect the collective of rank 0's stage.

        Raises ``rank_failed`` and ``rank_late``; the group is closed then.
        """
        if self.collective is None:
            return
        try:
            self.collective.connect(START_SECONDS)
            late, operation = self.collective.late_rank, self.collective.operation
            if late is not None and self._failure is None:
                self._failure = error("rank_late", rank=late, limit=START_SECONDS, operation=operation)
            self.check()
        except BaseException:
            self.close()
            raise

    def wait_loaded(self, config: EngineConfig, sharing: str) -> None:
        """Wait until every rank has loaded the checkpoint of ``config``, and compare with rank 0; see RankLoaded.

        Raises the error of a rank that failed to load.
        """
        checkpoint = checkpoint_digest(config)
        for rank, message in self._collect(RankLoaded, "loading the model"):
            if (message.version, message.checkpoint) != (version("aiakq"), checkpoint):
                raise error(
                    "rank_failed", rank=rank, reason="it loaded different files, or runs a different version of aiakq"
                )
            if rank < self.size and message.sharing != sharing:
                reason = f"it shards layers differently ({message.sharing}) from rank 0 ({sharing})"
                raise error("rank_failed", rank=rank, reason=reason)

    def count_pages(self, num_pages: int) -> int:
        """Return the number of KV cache pages that fit into the memory of every rank. Raises ``no_memory``.

        num_pages  number of pages that fit into rank 0's memory.
        """
        self.send(CountPages())
        messages = self._collect(PagesCounted, "counting its pages")
        return min([num_pages, *(message.pages for _, message in messages)])

    def configure(self, sizes: Configure, captures: bool) -> None:
        """Have all ranks set up their caches, and wait until they have; see RankReady. Raises ``rank_failed``."""
        self.send(sizes)
        for rank, message in self._collect(RankReady, "setting up its cache"):
            if rank < self.size and message.captures != captures:
                reason = f"it has {'' if message.captures else 'not '}captured its steps, unlike rank 0"
                raise error("rank_failed", rank=rank, reason=reason)

    # --- steps ---

    def send(self, record: ToRank) -> None:
        """Send a record to every rank."""
        frame = framed(record)
        for rank in self._ranks:
            try:
                rank.channel.send_bytes(frame)
            except Disconnected:
                self.check(gone=rank.number)

    def next_result(self, number: int) -> StepResult | None:
        """Wait for the result of step ``number``; return None if a rank ran out of memory in the step.

        Raises ``rank_failed``, and ``rank_late`` for a rank that sends no heartbeat.
        """
        began = time.monotonic()
        while number not in self._short:
            try:
                rank, message = self._arrived.get(timeout=self._time_limit / 4)
            except queue.Empty:
                self._check_alive(began, self._time_limit)
                continue
            if message is None:
                self.check(gone=rank)
            if isinstance(message, Results) and message.number == number:
                return message.result
            if isinstance(message, OutOfMemory):
                self._short.add(message.number)
        return None

    def launch(self, compute: Callable[[], Result]) -> Result:
        """Run rank 0's part of a step that the other ranks have begun, and watch that it ends in time.

        Raises MemoryError if a rank ran out of memory, and ``rank_failed`` and ``rank_late`` where the group cannot go
        on.
        """
        collective = self.collective
        try:
            result = compute()
        except Exception as failure:
            if collective is None or collective.can_start_over or not is_out_of_memory(failure):
                raise
            self._failure = self._failure or error("rank_failed", rank=0, reason=NO_MEMORY)
            self.check()
            raise self._failure from None
        if collective is not None:
            collective.watch_step()
            if collective.is_given_up:
                self.check()
                self.check_results()
                # Either a rank ran out of memory, or it exited and the reader thread has not noticed yet.
                raise MemoryError("a rank ran out of memory in the step")
        return result

    def check_results(self) -> None:
        """Raise ``rank_failed`` or ``rank_late`` if results of rank 0's stage are not valid, for good."""
        if is_lost(self.collective):
            self.lose()

    def abandon_steps(self, number: int) -> None:
        """Have every rank drop the steps from ``number`` on, even if they are running."""
        if self.collective is not None:
            self.collective.interrupt()
        self.send(Abandon(number))
        self._collect(Abandoned)
        self._short.clear()
        if self.num_stages > 1:
            self.send(Resume())
            self._collect(Resumed)
        if self.collective is not None:
            self.collective.start_over()
        if self.link is not None:
            self.link.epoch += 1

    def check(self, gone: int | None = None) -> None:
        """Raise ``rank_failed`` or ``rank_late``, and kill all ranks, if one of them has failed.

        gone  rank whose connection ended.
        """
        collective, lost, reason = self.collective, gone, "it closed its socket"
        if gone is None and collective is not None:
            if collective.late_rank is not None:
                self._failure = self._failure or self._late(collective.late_rank, collective.operation)
            lost, reason = collective.lost_rank, "its connection to rank 0 ended"
        if self._failure is None and lost is not None:
            self._readers[lost - 1].join(5.0)  # the reader thread records the cause
            self._failure = self._failure or error("rank_failed", rank=lost, reason=reason)
        if self._failure is not None:
            for rank in self._ranks:  # the group cannot continue, and a rank that hangs does not exit by itself
                rank.process.kill()
            raise self._failure

    def lose(self) -> NoReturn:
        """Raise the cause of a failed collective: ``rank_failed`` or ``rank_late``."""
        deadline = time.monotonic() + 5.0
        while self._failure is None and time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)  # the reader thread may not have noticed the exit yet
        reason = self.collective.failure if self.collective is not None else ""
        self._failure = self._failure or error(
            "rank_failed", rank=0, reason=reason or "it lost its connections to the other ranks"
        )
        self.check()
        raise self._failure

    def close(self) -> None:
        """End the other ranks. Later calls do nothing."""
        if self._closing:
            return
        self._closing = True
        self._give_up()
        if self.link is not None:
            self.link.close()
        for rank in self._ranks:
            rank.channel.hang_up()
        for rank, reader in zip(self._ranks, self._readers, strict=True):
            rank.process.end()
            reader.join(5.0)
            rank.channel.close()
        self._on_close()

    # --- messages from the ranks ---

    def _stall(self, rank: int) -> None:
        """Raise ``rank_late``: a rank has not read for as long as a step may take."""
        self._failure = self._failure or self._late(rank, "receiving the next step")
        self.check()

    def _late(self, rank: int, operation: str) -> AiakqError:
        return error("rank_late", rank=rank, limit=self._time_limit, operation=operation)

    def _check_alive(self, since: float, limit: float) -> None:
        """Raise if a rank has failed, or has sent nothing for ``limit`` seconds since its last message or ``since``."""
        self.check()
        now = time.monotonic()
        for rank in self._ranks:
            if now - max(rank.channel.heard, since) > limit:
                self._failure = error("rank_late", rank=rank.number, limit=limit, operation="no heartbeat")
                self.check()

    def _collect(self, kind: type[Answer], work: str | None = None) -> list[tuple[int, Answer]]:
        """Wait for one message of type ``kind`` from every rank; drop other messages.

        work  what the ranks do meanwhile, within LOAD_SECONDS; None for a time limit on heartbeats only.
        """
        missing, began = {rank.number for rank in self._ranks}, time.monotonic()
        received: list[tuple[int, Answer]] = []
        while missing:
            try:
                rank, message = self._arrived.get(timeout=min(self._time_limit / 4, 1.0))
            except queue.Empty:
                if work and time.monotonic() - began > LOAD_SECONDS:
                    self._failure = error("rank_late", rank=min(missing), limit=LOAD_SECONDS, operation=work)
                self._check_alive(began, max(self._time_limit, SILENT_SECONDS) if work else self._time_limit)
                continue
            if message is None:
                self.check(gone=rank)
            if isinstance(message, kind):
                missing.discard(rank)
                received.append((rank, message))
        return received

    def _read(self, rank: Rank) -> None:
        """Receive the messages of a rank until its connection ends; runs in a thread per rank."""
        failure = follow(
            rank.process,
            rank.channel,
            lambda message: self._arrived.put((rank.number, message)),
            lambda reason: error("rank_failed", rank=rank.number, reason=reason),
        )
        if not self._closing:
            self._failure = self._failure or failure
            self._give_up()
        self._arrived.put((rank.number, None))

    def _give_up(self) -> None:
        for collective in self._collectives:
            collective.give_up()
