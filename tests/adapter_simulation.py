"""A simulation of a scheduler with LoRA adapters and of an executor that loads and stages them."""

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


class AdapterSimulation:
    """A scheduler and the adapters of an executor.

    slots            keys of loaded adapters by slot.
    staging          keys of adapters that are being read from disk.
    staged           keys of adapters that were read and wait for a slot.
    staging_order    all keys in the order in which their staging began.
    staged_per_step  adapters whose staging completes in a step.
    """

    def __init__(self, num_pages: int = 60, max_num_seqs: int = 4, **lora: int) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
        self.max_staged = LoraConfig(**lora).max_staged
        self.resource = AdapterResource(LoraConfig(**lora))
        self.scheduler = Scheduler(PagePool(num_pages, 4), config, [self.resource])
        self.slots: dict[int, str] = {}
        self.staging: list[str] = []
        self.staged: set[str] = set()
        self.staging_order: list[str] = []
        self.staged_per_step = 99
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
        """Run one step and return the sequences in it."""
        self.steps += 1
        pool = self.resource.pool
        for key in self.staging[: self.staged_per_step]:
            self.staging.remove(key)
            self.staged.add(key)
            pool.set_ready(key)
        chunks = self.scheduler.schedule(float(self.steps))
        if chunks:
            for new in pool.changes():
                if isinstance(new, FreeAdapter):
                    del self.slots[new.slot]
                    continue
                assert new.slot not in self.slots, "the slot is in use"
                assert new.adapter.key in self.staged, "the step would wait for the adapter to be read"
                self.staged.remove(new.adapter.key)
                self.slots[new.slot] = new.adapter.key
        dropped, wanted = pool.staging_changes()
        for adapter in dropped:
            self.staged.discard(adapter.key)
            self.staging = [key for key in self.staging if key != adapter.key]
        for adapter in wanted:
            assert adapter.key not in self.staged and adapter.key not in self.staging, "the adapter is staged twice"
            self.staging.append(adapter.key)
            self.staging_order.append(adapter.key)
        assert len(self.staging) + len(self.staged) <= self.max_staged
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

    def stage_all(self) -> None:
        """Run steps until every adapter that can be staged is staged."""
        while True:
            count = len(self.staging_order)
            self.step()
            if not self.staging and len(self.staging_order) == count:
                return

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("sequences wait forever")
