"""RankGroup: the other ranks, seen from rank 0, which sends them what it decides and notices their end.

Rank r belongs to stage r // size, the ranks of a stage share its layers, and the first one of the last stage samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NoReturn, Protocol

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import file_sizes
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.collectives import RankCollective
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Alive,
    Channel,
    Configure,
    CountPages,
    FromRank,
    OutOfMemory,
    PagesCounted,
    RankFailed,
    RankLoaded,
    RankReady,
    Results,
    Resume,
    Resumed,
    ToRank,
    frame,
)
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.engine.records import StepResult

#: Seconds that a rank may take to load the model, or to set up its cache.
LOAD_SECONDS = 1800.0
#: Seconds that a rank may take to start.
START_SECONDS = 300.0
#: Seconds without a sign of life after which a rank that loads is given up, if the time limit of steps is less.
SILENT_SECONDS = 60.0


class Rank(Protocol):
    """A rank other than 0, as whoever started it sees it.

    number   counted over all ranks.
    channel  to it; the time limit of sending is set.
    """

    number: int
    channel: Channel

    def kill(self) -> None:
        """End it at once, whatever it does."""

    def end(self) -> None:
        """Wait for its end, its channel being shut down, and kill it if it does not come."""

    def exit_reason(self) -> str:
        """Why it ended, in words."""


def checkpoint_digest(config: EngineConfig) -> str:
    """Equal for ranks that load the same files."""
    facts = (file_sizes(config.load.path), sorted(config.model.raw.items(), key=str))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class RankGroup:
    """Ranks 1 and up.

    size        ranks of a stage, of which there are ``num_stages``.
    threads     of each rank.
    host_ranks  ranks that share the memory of rank 0's machine.
    collective  rank 0's part in what the ranks of the first stage compute together; None: it is alone in it.
    link        to the next stage; None: there is one stage.
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
        """collectives: those of stages that this process can end the waiting of, the first stage's first.

        host_ranks: None: all.
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
        self._heard = [0.0] * (len(ranks) + 1)
        self._short: set[int] = set()  # steps that a rank had not enough memory for, while an earlier one was awaited
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"rank-{rank.number}", daemon=True) for rank in ranks
        ]
        for reader in self._readers:
            reader.start()

    @property
    def share(self) -> ModelShare:
        """What rank 0 loads."""
        return ModelShare(self.collective, 0, self.num_stages)

    def describe(self) -> str:
        """The ranks in words, for the start-up table."""
        words = [f"{self.num_stages} stages"] if self.num_stages > 1 else []
        if self.size > 1:
            words.append(f"{self.size} processes share each layer")
        return "; ".join([*words, f"threads of each: {self.threads}"])

    # --- starting ---

    def connect(self) -> None:
        """Meet the ranks of this one's stage. Raises ``rank_failed`` and ``rank_late``; the group is then closed."""
        if self.collective is None:
            return
        try:
            self.collective.connect(START_SECONDS)
            late, place = self.collective.late_rank, self.collective.place
            if late is not None and self._failure is None:
                self._failure = error("rank_late", rank=late, limit=START_SECONDS, place=place)
            self.check()
        except BaseException:
            self.close()
            raise

    def wait_loaded(self, config: EngineConfig, sharing: str) -> None:
        """Wait until every rank has loaded the checkpoint of ``config``; see RankLoaded. Raises the error that kept one
        from it.
        """
        checkpoint = checkpoint_digest(config)
        for rank, message in self._answers(RankLoaded, "load the model"):
            assert isinstance(message, RankLoaded)
            if (message.version, message.checkpoint) != (version("aiakq"), checkpoint):
                raise error("rank_failed", rank=rank, reason="it has loaded other files, or is another version")
            if rank < self.size and message.sharing != sharing:
                reason = f"it does not share layers as rank 0 does ({sharing}), but otherwise ({message.sharing})"
                raise error("rank_failed", rank=rank, reason=reason)

    def count_pages(self, own: int) -> int:
        """Pages that fit into the memory of every rank; of rank 0 they are ``own``. Raises ``no_memory``."""
        self.send(CountPages())
        found = self._answers(PagesCounted, "count its pages")
        return min([own, *(message.pages for _, message in found if isinstance(message, PagesCounted))])

    def configure(self, sizes: Configure, captures: bool) -> None:
        """Have the ranks set up their caches, and wait until they have; see RankReady. Raises ``rank_failed``."""
        self.send(sizes)
        for rank, message in self._answers(RankReady, "set up its cache"):
            assert isinstance(message, RankReady)
            if rank < self.size and message.captures != captures:
                reason = f"it has {'' if message.captures else 'not '}captured its steps, other than rank 0"
                raise error("rank_failed", rank=rank, reason=reason)

    # --- steps ---

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

    def next_result(self, number: int) -> StepResult | None:
        """What the last stage sampled in step ``number``; None if a rank had not enough memory for the step.

        Raises ``rank_failed`` and ``rank_late``: for a rank that shows no sign of life.
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

    def abandon_steps(self, number: int) -> None:
        """Have every rank forget the steps from ``number`` on, even if they have begun."""
        if self.collective is not None:
            self.collective.interrupt()
        self.send(Abandon(number))
        self._answers(Abandoned)
        self._short.clear()
        if self.num_stages > 1:
            self.send(Resume())
            self._answers(Resumed)
        if self.collective is not None:
            self.collective.start_over()
        if self.link is not None:
            self.link.epoch += 1

    def check(self, gone: int | None = None) -> None:
        """End the ranks and raise ``rank_failed`` or ``rank_late`` if they cannot go on.

        gone  a rank that cannot be reached.
        """
        if gone is not None and self._failure is None:
            self._readers[gone - 1].join(5.0)  # it knows why
        if self._failure is None and gone is not None:
            self._failure = error("rank_failed", rank=gone, reason="it closed its socket")
        late = None if self.collective is None else self.collective.late_rank
        if self._failure is None and self.collective is not None and late is not None:
            self._failure = self._late(late, self.collective.place)
        lost = None if self.collective is None else self.collective.lost_rank
        if self._failure is None and lost is not None:
            self._readers[lost - 1].join(5.0)
            self._failure = self._failure or error("rank_failed", rank=lost, reason="its connection to rank 0 ended")
        if self._failure is not None:
            for rank in self._ranks:  # they are of no use any more, and one that hangs ends in no other way
                rank.kill()
            raise self._failure

    def lose(self) -> NoReturn:
        """Raise why the ranks do not meet any more: ``rank_failed`` or ``rank_late``."""
        deadline = time.monotonic() + 5.0
        while self._failure is None and time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)  # the thread that notices the end of a rank is behind
        reason = self.collective.failure if self.collective is not None else ""
        self._failure = self._failure or error("rank_failed", rank=0, reason=reason or "it has lost the others")
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
            with contextlib.suppress(OSError):
                rank.channel.socket.shutdown(socket.SHUT_RDWR)
        for rank, reader in zip(self._ranks, self._readers, strict=True):
            rank.end()
            reader.join(5.0)
            rank.channel.socket.close()
        self._on_close()

    # --- what arrives ---

    def _late(self, rank: int, place: str) -> AiakqError:
        return error("rank_late", rank=rank, limit=self._time_limit, place=place)

    def _check_alive(self, since: float, limit: float) -> None:
        """Raise if a rank has failed, or nothing of it was heard for ``limit`` seconds, at least from ``since`` on."""
        self.check()
        now = time.monotonic()
        for rank in self._ranks:
            if now - max(self._heard[rank.number], since) > limit:
                self._failure = error("rank_late", rank=rank.number, limit=limit, place="a sign of life")
                self.check()

    def _answers(self, kind: type[FromRank], work: str | None = None) -> list[tuple[int, FromRank]]:
        """One message of ``kind`` from every rank; others are dropped.

        work  what they do for it, for which they have LOAD_SECONDS; None: they need only show signs of life.
        """
        missing, found = {rank.number for rank in self._ranks}, []
        began = time.monotonic()
        while missing:
            try:
                rank, message = self._arrived.get(timeout=min(self._time_limit / 4, 1.0))
            except queue.Empty:
                if work and time.monotonic() - began > LOAD_SECONDS:
                    place = f"the end of its work to {work}"
                    self._failure = error("rank_late", rank=min(missing), limit=LOAD_SECONDS, place=place)
                self._check_alive(began, max(self._time_limit, SILENT_SECONDS) if work else self._time_limit)
                continue
            if message is None:
                self.check(gone=rank)
            if isinstance(message, kind):
                missing.discard(rank)
                found.append((rank, message))
        return found

    def _read(self, rank: Rank) -> None:
        """In a thread for each rank: its messages, and its end."""
        failure: AiakqError | None = None
        while (message := rank.channel.receive_from_rank()) is not None:
            self._heard[rank.number] = time.monotonic()
            if isinstance(message, RankFailed):
                failure = error(message.id, **message.fields)
            elif not isinstance(message, Alive):
                self._arrived.put((rank.number, message))
        if not self._closing:
            reason = failure or error("rank_failed", rank=rank.number, reason=rank.exit_reason())
            self._failure = self._failure or reason
            self._give_up()
        self._arrived.put((rank.number, None))

    def _give_up(self) -> None:
        for collective in self._collectives:
            collective.give_up()
