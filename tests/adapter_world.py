"""A scheduler with LoRA adapters, and what an executor has of them."""

from __future__ import annotations

from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import FreeAdapter
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams


def ref(key: str, nbytes: int = 10) -> AdapterRef:
    return AdapterRef(key, f"name of {key}", f"/adapters/{key}", nbytes)


class World:
    """A scheduler, and an executor's adapters: those that are loaded (``slots``), being read, and read.

    reads           keys in the order in which they were staged.
    reads_per_step  adapters that are read during a step.
    """

    def __init__(self, num_pages: int = 60, max_num_seqs: int = 4, **lora: int) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
        self.max_staged = LoraConfig(**lora).max_staged
        self.resource = AdapterResource(LoraConfig(**lora))
        self.scheduler = Scheduler(PagePool(num_pages, 4), config, [self.resource])
        self.slots: dict[int, str] = {}
        self.reading: list[str] = []
        self.read: set[str] = set()
        self.reads: list[str] = []
        self.reads_per_step = 99
        self.count = 0
        self.steps = 0

    def add(
        self, adapter: AdapterRef | None, tokens: int = 3, prompt: int = 3, client: str = "", group: str = ""
    ) -> Sequence:
        self.count += 1
        sampling = SamplingParams(max_tokens=tokens)
        spec = RequestSpec(
            f"r{self.count}",
            [self.count % 90] * prompt,
            sampling,
            tokens,
            0,
            options=RequestOptions(adapter=adapter, client=client),
            group=group,
        )
        sequence = Sequence(spec, RequestTimes(float(self.steps)))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """One step; returns the sequences that ran."""
        self.steps += 1
        pool = self.resource.pool
        for key in self.reading[: self.reads_per_step]:
            self.reading.remove(key)
            self.read.add(key)
            pool.set_ready(key)
        chunks = self.scheduler.schedule(float(self.steps))
        if chunks:
            for new in pool.changes():
                if isinstance(new, FreeAdapter):
                    del self.slots[new.slot]
                    continue
                assert new.slot not in self.slots, "the slot is in use"
                assert new.adapter.key in self.read, "a step reads an adapter"
                self.read.remove(new.adapter.key)
                self.slots[new.slot] = new.adapter.key
        dropped, wanted = pool.staging_changes()
        for adapter in dropped:
            self.read.discard(adapter.key)
            self.reading = [key for key in self.reading if key != adapter.key]
        for adapter in wanted:
            assert adapter.key not in self.read and adapter.key not in self.reading, "it is staged twice"
            self.reading.append(adapter.key)
            self.reads.append(adapter.key)
        assert len(self.reading) + len(self.read) <= self.max_staged
        for chunk in chunks:
            adapter = chunk.sequence.adapter
            assert adapter is None or adapter.key in self.slots.values(), "an adapter that runs was evicted"
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.collected(chunk)
            self.scheduler.insert_pages(chunk)
            if chunk.samples:
                sequence.token_ids.append(7)
                if sequence.num_outputs == sequence.spec.max_tokens:
                    self.scheduler.remove(sequence)
        self.scheduler.check()
        return [chunk.sequence for chunk in chunks]

    def read_all(self) -> None:
        """Step until every adapter is read that has room and that nobody runs with."""
        while True:
            count = len(self.reads)
            self.step()
            if not self.reading and len(self.reads) == count:
                return

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("sequences wait forever")
