"""AdapterPool: which LoRA adapters are in memory and which may run, decided by the scheduler.

An adapter is loaded in the step in which the first sequence with it starts. Before that it is staged: the executor
reads and packs it while steps run, so that no step reads files. It stays in memory until another one needs its place.
The least recently used adapter is evicted, those of waiting sequences last, and never one that runs, or that a waiting
sequence of a request that has begun will run with (it was preempted, or another sequence of the request has run). An
evicted adapter is staged again. Executors load what a batch says.

The files of an adapter that was unloaded or replaced may be gone: it stays in memory until its sequences have ended,
and starts before adapters that can be read again. The adapter that replaces it is staged before requests may name it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import FreeAdapter, LoadAdapter

#: Sequences that may start before one that waits for its adapter; then the running adapters' sequences run out.
MAX_OVERTAKING = 32


@dataclass
class _Staged:
    """An adapter that is not loaded yet; ``is_ready`` once the executor has read it."""

    adapter: AdapterRef
    is_ready: bool = False


class AdapterPool:
    """Slots of adapters in memory, and adapters that are staged.

    freed, loaded    slots and adapters for the next batch to the executor; ``changes`` empties them.
    dropped, wanted  adapters that the executor drops from staging, and then those that it stages; ``staging_changes``
                     empties them.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._live: Counter[str] = Counter()  # waiting and running sequences
        self._running: Counter[str] = Counter()
        self._resident: OrderedDict[str, tuple[int, int]] = OrderedDict()  # slot and bytes, not used for longest first
        self._free = list(reversed(range(config.max_resident)))
        self._unwanted: set[str] = set()
        self._replaced: set[str] = set()  # have sequences, and may not be readable any more
        self._prefetched: set[str] = set()  # staged or in memory since before the first sequence with them
        self._pinned: Counter[str] = Counter()  # waiting sequences of requests that have begun
        self._is_blocked = False
        self._num_overtaking = 0
        self.freed: list[int] = []
        self.loaded: list[LoadAdapter] = []
        self._staged: dict[str, _Staged] = {}
        self.dropped: list[AdapterRef] = []
        self.wanted: list[AdapterRef] = []

    @property
    def num_running(self) -> int:
        """Different adapters of running sequences."""
        return len(self._running)

    @property
    def num_resident(self) -> int:
        """Adapters in memory."""
        return len(self._resident)

    def add(self, adapter: AdapterRef | None) -> None:
        """A sequence with ``adapter`` waits."""
        if adapter is not None:
            self._live[adapter.key] += 1
            self._replaced.discard(adapter.key)  # it has been loaded again

    def remove(self, adapter: AdapterRef | None) -> None:
        """A sequence with ``adapter`` has ended, and does not run any more."""
        if adapter is not None:
            _decrease(self._live, adapter.key)
            self._drop_unwanted(adapter.key)
            if adapter.key not in self._live and adapter.key in self._staged and adapter.key not in self._prefetched:
                self._unstage(adapter)

    def prefetch(self, adapter: AdapterRef) -> bool:
        """Have ``adapter`` read before any sequence names it. Returns whether there is room for it.

        There is none for one that was replaced and still has sequences: with others behind it, it would never end.
        """
        if adapter.key in self._replaced:
            return False
        self._unwanted.discard(adapter.key)
        if adapter.key not in self._resident and adapter.key not in self._staged:
            if not self._make_staging_room(adapter):
                return False
            self._stage(adapter)
        self._prefetched.add(adapter.key)
        return True

    def is_resident(self, key: str) -> bool:
        """Whether an adapter is in memory."""
        return key in self._resident

    def unload(self, key: str, is_replaced: bool = False) -> None:
        """Drop an adapter from memory once the last sequence with it has ended.

        is_replaced  whether no further sequence will name it, and its files may be gone.
        """
        self._unwanted.add(key)
        if is_replaced:
            self._replaced.add(key)
        self._drop_unwanted(key)

    def end_step(self, waiting: Iterable[AdapterRef | None]) -> None:
        """The sequences of a step have been chosen. Stage the adapters of ``waiting`` ones, in their order, while there
        is room.
        """
        self._is_blocked = False
        if len(self._staged) >= self._config.max_staged and self._staged.keys() <= self._live.keys():
            return
        if all(key in self._resident or key in self._staged for key in self._live):
            return
        for adapter in waiting:
            if adapter is None or adapter.key in self._resident or adapter.key in self._staged:
                continue
            if not self._make_staging_room(adapter):
                return
            self._stage(adapter)

    def set_ready(self, key: str) -> None:
        """A staged adapter has been read. Ignored if it is no longer staged."""
        if key in self._staged:
            self._staged[key].is_ready = True

    def staging_changes(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """``dropped`` and ``wanted`` since the last call."""
        changed = self.dropped, self.wanted
        self.dropped, self.wanted = [], []
        return changed

    def admits(self, adapter: AdapterRef | None, has_begun: bool = False) -> bool:
        """Whether a sequence with ``adapter`` may start now. If not, only a few of those behind it may.

        has_begun  whether the sequence has pinned its adapter.
        """
        if adapter is None:
            return True
        must_end = has_begun or adapter.key in self._replaced  # others may wait for its place
        if self._is_blocked and self._num_overtaking >= MAX_OVERTAKING and not must_end:
            return False
        if adapter.key not in self._resident:
            staged = self._staged.get(adapter.key)
            if staged is None or not staged.is_ready:
                return False
        if adapter.key in self._running or self._has_room(adapter):
            return True
        self._is_blocked = True
        return False

    def start(self, adapter: AdapterRef | None) -> None:
        """A sequence starts that ``admits`` let start."""
        if adapter is None:
            return
        self._num_overtaking = self._num_overtaking + 1 if self._is_blocked else 0
        self._running[adapter.key] += 1
        if adapter.key not in self._resident:
            del self._staged[adapter.key]
            self._make_room(adapter)
            slot = self._free.pop()
            self._resident[adapter.key] = slot, adapter.nbytes
            self.loaded.append(LoadAdapter(slot, adapter))
        self._resident.move_to_end(adapter.key)

    def stop(self, adapter: AdapterRef | None) -> None:
        """A sequence does not run any more."""
        if adapter is not None:
            _decrease(self._running, adapter.key)

    def pin(self, adapter: AdapterRef | None) -> None:
        """A sequence waits whose request has begun: its adapter stays in memory, because its files may change."""
        if adapter is not None:
            self._pinned[adapter.key] += 1

    def unpin(self, adapter: AdapterRef | None) -> None:
        """A sequence that has pinned its adapter starts, or has ended."""
        if adapter is not None:
            _decrease(self._pinned, adapter.key)

    def changes(self) -> list[FreeAdapter | LoadAdapter]:
        """Return the commands for the next batch: ``freed`` and ``loaded`` since the last call."""
        if not (self.freed or self.loaded):
            return []
        commands: list[FreeAdapter | LoadAdapter] = [*map(FreeAdapter, self.freed), *self.loaded]
        self.freed, self.loaded = [], []
        return commands

    def check(self) -> None:
        """Assert that no slot is lost or used twice, and that what runs is in memory and within its limits."""
        slots = [slot for slot, _ in self._resident.values()]
        assert sorted([*slots, *self._free]) == list(range(self._config.max_resident)), "an adapter's slot is lost"
        assert self._running.keys() <= self._resident.keys(), "an adapter that runs was evicted"
        assert self._pinned.keys() <= self._resident.keys(), "the adapter of a request that has begun was evicted"
        assert len(self._running) <= self._config.max_loras, "too many adapters run"
        assert all(count <= self._live[key] for key, count in self._running.items()), "an adapter's count is wrong"
        limit = self._config.max_bytes
        assert limit is None or sum(size for _, size in self._resident.values()) <= limit, "too many bytes"
        assert not self._staged.keys() & self._resident.keys(), "an adapter in memory is staged"
        assert self._staged.keys() <= self._live.keys() | self._prefetched, (
            "an adapter is staged that no sequence needs"
        )
        assert len(self._staged) <= self._config.max_staged, "too many adapters are staged"
        staged_bytes = sum(staged.adapter.nbytes for staged in self._staged.values())
        assert limit is None or staged_bytes <= limit, "too many bytes are staged"

    def _has_room(self, adapter: AdapterRef) -> bool:
        if len(self._running) >= self._config.max_loras:
            return False
        if adapter.key in self._resident:
            return True
        sizes = [size for key, (_, size) in self._resident.items() if self._stays(key)]
        if adapter.key not in self._replaced:
            sizes += [staged.adapter.nbytes for key, staged in self._staged.items() if key in self._replaced]
        limit = self._config.max_bytes
        return len(sizes) < self._config.max_resident and (limit is None or sum(sizes) + adapter.nbytes <= limit)

    def _stays(self, key: str) -> bool:
        """Whether an adapter in memory may not be evicted."""
        return key in self._running or key in self._pinned or (key in self._replaced and key in self._live)

    def _make_room(self, adapter: AdapterRef) -> None:
        limit = self._config.max_bytes
        size = adapter.nbytes + sum(size for _, size in self._resident.values())
        idle = [key for key in self._resident if not self._stays(key)]
        for key in sorted(idle, key=lambda key: key in self._live):
            if self._free and (limit is None or size <= limit):
                return
            size -= self._resident[key][1]
            self._evict(key)

    def _stage(self, adapter: AdapterRef) -> None:
        self._staged[adapter.key] = _Staged(adapter)
        self.wanted.append(adapter)

    def _make_staging_room(self, adapter: AdapterRef) -> bool:
        """Drop staged adapters that no sequence needs until one more may be staged; return whether it may."""
        limit = self._config.max_bytes
        idle = [staged.adapter for key, staged in self._staged.items() if key not in self._live]
        count = len(self._staged)
        used = sum(staged.adapter.nbytes for staged in self._staged.values())
        dropped = list[AdapterRef]()
        while count >= self._config.max_staged or (count and limit is not None and used + adapter.nbytes > limit):
            if not idle:
                return False
            dropped.append(idle.pop(0))
            count, used = count - 1, used - dropped[-1].nbytes
        for each in dropped:
            self._prefetched.discard(each.key)
            self._unstage(each)
        return True

    def _unstage(self, adapter: AdapterRef) -> None:
        """Drop an adapter from staging; what the executor has not been asked for yet, it is not asked for."""
        self._staged.pop(adapter.key, None)
        wanted = [each for each in self.wanted if each.key != adapter.key]
        if len(wanted) == len(self.wanted):
            self.dropped.append(adapter)
        self.wanted = wanted

    def _drop_unwanted(self, key: str) -> None:
        if key in self._unwanted and key not in self._live:
            for marked in (self._unwanted, self._replaced, self._prefetched):
                marked.discard(key)
            if key in self._resident:
                self._evict(key)
            elif key in self._staged:
                self._unstage(self._staged[key].adapter)

    def _evict(self, key: str) -> None:
        slot, _ = self._resident.pop(key)
        self._prefetched.discard(key)
        self._free.append(slot)
        unseen = [new.adapter for new in self.loaded if new.slot == slot]
        self.loaded = [new for new in self.loaded if new.slot != slot]
        if unseen:
            self.dropped += unseen  # the executor has staged it, but no batch loads it
        else:
            self.freed.append(slot)


def _decrease(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    assert counts[key] >= 0, "an adapter was counted wrongly"
    if not counts[key]:
        del counts[key]
