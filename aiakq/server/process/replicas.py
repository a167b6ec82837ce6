"""Replicas: several engines of one model behind one HTTP process, each with its own process, weights and pages."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import Command, ResetPrefixCache
from aiakq.runtime.protocol.output import EngineStats
from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.server.errors import copy_error
from aiakq.server.process.adapter_calls import AdapterCalls
from aiakq.server.process.ipc import Configured, Ready
from aiakq.server.process.lost_adapters import AdapterVersions
from aiakq.server.process.request_manager import RequestManager
from aiakq.server.process.request_stream import RequestStream
from aiakq.server.process.supervisor import LoadingProgress, Supervisor
from aiakq.server.telemetry.events import OnEvent
from aiakq.system.threads import available_threads
from aiakq.system.topology import cpu_shares

#: Maximum number of prefixes to remember, and maximum number of pages of a prompt to look up.
MAX_PREFIXES, MAX_PAGES = 1 << 16, 256
#: Load of an unfinished sequence, in prompt tokens.
SEQUENCE_TOKENS = 64


class PrefixMap:
    """An LRU map from prompt prefixes to the replicas that have computed them."""

    def __init__(self, page_size: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self._page_size, self._max_prefixes = page_size, max_prefixes
        self._replica_of: OrderedDict[bytes, int] = OrderedDict()

    def hashes(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Return the hashes of the leading full pages of a prompt."""
        hashes, parent = [], salt.encode()
        for end in range(self._page_size, min(len(token_ids), MAX_PAGES * self._page_size) + 1, self._page_size):
            page = array("q", token_ids[end - self._page_size : end])
            parent = hashlib.blake2b(parent + page.tobytes(), digest_size=16).digest()
            hashes.append(parent)
        return hashes

    def num_cached(self, hashes: Sequence[bytes], replica: int) -> int:
        """Return the number of prefix tokens that ``replica`` has computed."""
        pages = 0
        while pages < len(hashes) and self._replica_of.get(hashes[pages]) == replica:
            pages += 1
        return pages * self._page_size

    def insert(self, hashes: Sequence[bytes], replica: int) -> None:
        """Record that ``replica`` computes these pages."""
        for page in hashes:
            self._replica_of[page] = replica
            self._replica_of.move_to_end(page)
        while len(self._replica_of) > self._max_prefixes:
            self._replica_of.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Remove all prefixes of ``replica``, or of all replicas, whose pages are lost."""
        kept = {} if replica is None else {page: one for page, one in self._replica_of.items() if one != replica}
        self._replica_of = OrderedDict(kept)


class Replicas:
    """Routes requests to replicas, with the interface of a ``RequestManager``.

    A request goes to the replica with the least work until its first token: the prompt tokens that are not cached
    there, the prompt tokens already waiting, and the running sequences.
    """

    def __init__(self, managers: Sequence[RequestManager], page_size: int) -> None:
        self.managers = managers
        self._prefixes = PrefixMap(page_size)

    def start(self, request: Request) -> RequestStream:
        """See RequestManager. Raises the error of the best replica if all of them refuse the request."""
        hashes = self._hashes(request)
        first: AiakqError | None = None
        for replica in self._order(request.prompts, hashes):
            try:
                stream = self.managers[replica].start(request)
            except AiakqError as failure:
                if failure.http_status != 503:
                    raise
                first = first or failure
            else:
                for pages in hashes:
                    self._prefixes.insert(pages, replica)
                return stream
        assert first is not None
        raise copy_error(first)

    def _hashes(self, request: Request) -> list[list[bytes]]:
        """Return the hashes of the pages of each prompt. Only prompts with the same salt and adapter share pages."""
        salt = str(request.options.page_scope)
        return [self._prefixes.hashes(prompt.token_ids, salt) for prompt in request.prompts]

    def _order(self, prompts: Sequence[Prompt], hashes: Sequence[Sequence[bytes]]) -> list[int]:
        """Return the replicas, best first; those without an engine come last."""

        def cost(replica: int) -> tuple[bool, int, int]:
            manager = self.managers[replica]
            tokens = manager.num_waiting_tokens + SEQUENCE_TOKENS * manager.num_unfinished
            for prompt, pages in zip(prompts, hashes, strict=True):
                tokens += len(prompt.token_ids) - self._prefixes.num_cached(pages, replica)
            return manager.failure is not None, tokens, replica

        return sorted(range(len(self.managers)), key=cost)

    def on_engine_end(self, replica: int) -> None:
        """Handle the end of a replica's engine: restart its requests on another replica, if there is one."""
        self._prefixes.forget(replica)
        if self.failure is not None:
            return
        for stream in self.managers[replica].take_restarting():
            prompts, hashes = stream.request.prompts, self._hashes(stream.request)
            self.managers[self._order(prompts, hashes)[0]].adopt(stream)

    @property
    def adapters(self) -> AdapterCalls:
        """Adapter calls of a running engine, if there is one."""
        running = [manager for manager in self.managers if manager.failure is None]
        return (running or self.managers)[0].adapters

    def adapters_of_requests(self) -> tuple[list[str], list[str]]:
        """See RequestManager."""
        adapters = [manager.adapters_of_requests() for manager in self.managers]
        running = {name for names, _ in adapters for name in names}
        return sorted(running), sorted({name for _, names in adapters for name in names} - running)

    async def prefetch_adapter(self, adapter: AdapterRef) -> None:
        """See RequestManager."""
        running = [manager for manager in self.managers if manager.failure is None]
        await asyncio.gather(*(manager.prefetch_adapter(adapter) for manager in running))

    def use_adapters(self, versions: AdapterVersions) -> None:
        """See RequestManager."""
        for manager in self.managers:
            manager.use_adapters(versions)

    def send(self, command: Command) -> None:
        """See RequestManager."""
        if isinstance(command, ResetPrefixCache):
            self._prefixes.forget()
        for manager in self.managers:
            manager.send(command)

    def expire(self, now: float) -> None:
        """See RequestManager."""
        for manager in self.managers:
            manager.expire(now)

    def fail_all(self, failure: AiakqError) -> None:
        """See RequestManager."""
        for manager in self.managers:
            manager.fail_all(failure)

    def abort(self, ids: Sequence[str] | None, failure: AiakqError) -> int:
        """See RequestManager."""
        return sum(manager.abort(ids, failure) for manager in self.managers)

    @property
    def failure(self) -> AiakqError | None:
        """Why no replica can generate; None while one can."""
        failures = [manager.failure for manager in self.managers]
        return None if None in failures else failures[0]

    @property
    def num_unfinished(self) -> int:
        """See RequestManager."""
        return sum(manager.num_unfinished for manager in self.managers)

    @property
    def num_prompt_tokens(self) -> int:
        """See RequestManager."""
        return sum(manager.num_prompt_tokens for manager in self.managers)

    @property
    def num_generation_tokens(self) -> int:
        """See RequestManager."""
        return sum(manager.num_generation_tokens for manager in self.managers)

    @property
    def stats(self) -> EngineStats:
        """The summed statistics of all engines."""
        return sum((manager.stats for manager in self.managers), EngineStats())


#: The request manager of a server with one or several engines.
Requests = RequestManager | Replicas


class Supervisors:
    """The engine processes of a server, one per replica.

    all      supervisor of each replica.
    closing  set at shutdown, so that engines that end are not restarted.
    """

    def __init__(self, args: ServerArguments, on_event: OnEvent) -> None:
        count = args.data_parallel_size
        threads = None if count == 1 else max(1, available_threads() // count)
        self.all = [
            Supervisor(args, on_event, number if count > 1 else None, cpus, threads)
            for number, cpus in enumerate(cpu_shares(count))
        ]

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down and engines are not restarted."""
        return self.all[0].closing

    @closing.setter
    def closing(self, value: bool) -> None:
        for supervisor in self.all:
            supervisor.closing = value

    @property
    def progress(self) -> LoadingProgress:
        """Loading progress of the first engine."""
        return self.all[0].progress

    async def start(self) -> None:
        """Start the processes. Raises ``engine_start`` if that fails."""
        for supervisor in self.all:
            await supervisor.start()

    async def load(self, on_configured: Callable[[Configured], None]) -> list[Ready]:
        """Wait until all engines are ready. Raises the error of the first one that failed to load."""
        first, *others = self.all
        loading = [asyncio.create_task(first.load(on_configured))]
        loading += [asyncio.create_task(supervisor.load(report=False)) for supervisor in others]
        try:
            return list(await asyncio.gather(*loading))
        finally:
            for task in loading:
                task.cancel()

    async def run(self, manager: Requests, ready: Sequence[Ready]) -> AiakqError:
        """Serve ``manager`` until no engine is left; returns the error that ended the last one."""
        if isinstance(manager, RequestManager):
            return await self.all[0].run(manager, ready[0])
        running = []
        for number, (supervisor, one) in enumerate(zip(self.all, manager.managers, strict=True)):
            supervisor.on_engine_end = partial(manager.on_engine_end, number)
            running.append(asyncio.create_task(supervisor.run(one, ready[number])))
        try:
            return (await asyncio.gather(*running))[-1]
        finally:
            for task in running:
                task.cancel()

    def kill(self) -> None:
        """Kill every engine."""
        for supervisor in self.all:
            supervisor.engine.kill()

    async def stop(self) -> None:
        """End every engine."""
        await asyncio.gather(*(supervisor.engine.stop() for supervisor in self.all))
