"""WorkerQueue: which request gets the next free worker of the text process."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from aiakq.server.process.text_messages import TextReply, TextRequest
from aiakq.system.async_channel import AsyncChannel

#: Maximum number of workers that process long texts or grammars, so that short texts are not delayed.
NUM_LONG = 2


@dataclass
class TextWorkerChannel:
    """The connection to one worker."""

    slot: int
    channel: AsyncChannel[TextRequest, TextReply]


@dataclass
class _Turn:
    """A request that waits for a worker. ``alone`` is its client, if that may have one such request at a time."""

    is_long: bool
    alone: str | None = None
    channel: asyncio.Future[TextWorkerChannel] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WorkerQueue:
    """Assigns free workers to waiting requests: round-robin over clients, at most NUM_LONG long requests at a time.

    Of long requests that are alone, a client has one at a time, so that it cannot delay those of another.
    """

    def __init__(self) -> None:
        self._free: deque[TextWorkerChannel] = deque()
        self._waiting: dict[str, deque[_Turn]] = {}  # the next client first
        self._num_long = 0
        self._alone: set[str] = set()  # clients that have such a request

    async def take(self, client: str, is_long: bool, is_alone: bool = False) -> TextWorkerChannel:
        """Wait for a free worker. Raises ConnectionError if the workers are restarted meanwhile."""
        turn = _Turn(is_long, client if is_alone else None)
        self._waiting.setdefault(client, deque()).append(turn)
        self._serve()
        try:
            return await turn.channel
        except asyncio.CancelledError:
            if turn.channel.done() and not turn.channel.cancelled() and not turn.channel.exception():
                self.put(turn.channel.result(), is_long, turn.alone)
            raise

    def put(self, channel: TextWorkerChannel | None, was_long: bool, alone: str | None = None) -> None:
        """Return ``channel`` after a request, unless its worker is gone. ``alone``: the client, if it was alone."""
        self._num_long -= was_long
        if alone is not None:
            self._alone.discard(alone)
        if channel is not None:
            self._free.append(channel)
        self._serve()

    def add(self, channel: TextWorkerChannel) -> None:
        """Add a new worker."""
        self.put(channel, was_long=False)

    def clear(self) -> None:
        """Discard all workers and fail the waiting requests."""
        self._free.clear()
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.channel.done():
                    turn.channel.set_exception(ConnectionError("the workers ended"))
        self._waiting.clear()

    def _serve(self) -> None:
        while self._free and (next_task := self._next()) is not None:
            self._num_long += next_task.is_long
            if next_task.alone is not None:
                self._alone.add(next_task.alone)
            next_task.channel.set_result(self._free.popleft())

    def _next(self) -> _Turn | None:
        """Remove the first request that may start; its client then comes last."""
        for client in list(self._waiting):
            turns = self._waiting[client]
            while turns and turns[0].channel.done():  # the client has disconnected
                turns.popleft()
            at = next((at for at, turn in enumerate(turns) if self._may_start(turn)), None)
            turn = None
            if at is not None:
                turn = turns[at]
                del turns[at]
                del self._waiting[client]
                if turns:
                    self._waiting[client] = turns
            elif not turns:
                del self._waiting[client]
            if turn is not None:
                return turn
        return None

    def _may_start(self, turn: _Turn) -> bool:
        if turn.channel.done() or (turn.alone is not None and turn.alone in self._alone):
            return False
        return not (turn.is_long and self._num_long >= NUM_LONG)
