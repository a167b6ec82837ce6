"""What the executor keeps of the running sequences: their tokens and their page tables, updated by each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aiakq.runtime.executor.logits_modifier import BudgetedModifier, LogitsModifier
from aiakq.runtime.executor.pooler import PromptPooler
from aiakq.runtime.executor.projection import Projection
from aiakq.runtime.executor.thought_tracker import SpelledBudget
from aiakq.runtime.lora.store import AdapterStore
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor
from aiakq.runtime.protocol.step import ADAPTER_FAILED, Chunk, NewSequence, StepBatch
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.matcher import GrammarMatcher


class SequenceState:
    """A running sequence.

    token_ids  prompt, then the tokens of collected steps.
    pages      its KV pages in order.
    modifier   of its logits.
    matcher    of its grammar, after ``token_ids``; None: it has none.
    pooler     of its prompt; None: it is continued.
    failure    why nothing it computes counts; None: it does.
    state_at   per row of its states, the number of tokens it is the state after, or none; see StateRows.
    """

    __slots__ = (
        *("drafted", "failure", "matcher", "modifier", "num_drafted", "num_prompt", "pages", "pooler", "sampling"),
        *("slot", "spec", "state_at", "token_ids"),
    )

    def __init__(
        self,
        record: NewSequence,
        logits_processors: Sequence[LogitsProcessor] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """vocabulary: None where nothing is sampled, or without budgets of thoughts."""
        spec: RequestSpec = record.spec
        self.slot = record.slot
        self.spec = spec
        self.sampling = spec.sampling
        self.token_ids = spec.prompt_token_ids + record.output_token_ids
        self.num_prompt = len(spec.prompt_token_ids)
        self.pages: list[int] = []
        self.state_at: list[int | None] = []
        if spec.thought is None or vocabulary is None:
            self.modifier = LogitsModifier(spec, logits_processors)
        else:
            spelled = SpelledBudget(spec.thought, vocabulary)
            self.modifier = BudgetedModifier(spec, logits_processors, self.token_ids, spelled)
        self.matcher: GrammarMatcher | None = None
        self.pooler: PromptPooler | None = None
        self.num_drafted: int | None = None
        self.drafted: list[int] = []
        self.failure: str | None = None


class RunningSequences:
    """The running sequences by slot, and one page table for all.

    page_table  [slots, max pages] int32 on the host; row s holds the pages of slot s, padded with page 0.
    compiler    of the sequences' grammars; None where nothing is sampled, or no grammar was announced.
    projection  of what is pooled, if the model has one.
    """

    def __init__(self, num_slots: int, max_pages: int, projection: Projection | None = None) -> None:
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32)
        self.compiler: GrammarCompiler | None = None
        self._projection = projection
        self._states: dict[int, SequenceState] = {}

    def update(
        self,
        batch: StepBatch,
        processors: Mapping[str, Sequence[LogitsProcessor]],
        adapters: AdapterStore | None = None,
    ) -> list[SequenceState]:
        """Free slots, add sequences and append pages as ``batch`` says; returns the sequence of each chunk.

        ``processors`` are logits processors by request id; ``adapters`` those in memory.
        """
        for slot in batch.freed_slots:
            state = self._states.pop(slot)
            self.page_table[slot, : len(state.pages)] = 0
        for record in batch.new_sequences:
            assert record.slot not in self._states, f"slot {record.slot} is in use"
            vocabulary = None if self.compiler is None else self.compiler.vocabulary
            state = SequenceState(record, processors.get(record.spec.request_id, ()), vocabulary)
            if record.spec.grammar is not None and self.compiler is not None:
                state.matcher = self.compiler.matcher_or_failed(record.spec.grammar, record.output_token_ids)
            if record.spec.options.pooling is not None:
                state.pooler = PromptPooler(record.spec.options.pooling, self._projection)
            if adapters is not None and record.spec.options.adapter is not None:
                failure = adapters.failure(record.spec.options.adapter)
                state.failure = None if failure is None else f"{ADAPTER_FAILED}: {failure}"
            self._states[record.slot] = state
        return [self._append_pages(chunk) for chunk in batch.chunks]

    def rows(self, slots: list[int], width: int) -> Tensor:
        """The first ``width`` pages of each of ``slots``: [len(slots), width] int32, possibly a view."""
        first, end = slots[0], slots[0] + len(slots)
        if len(slots) == 1 or slots == list(range(first, end)):
            return self.page_table[first:end, :width]
        return self.page_table[:, :width].index_select(0, torch.tensor(slots))

    def clear(self) -> None:
        """Free every slot."""
        self._states.clear()
        self.page_table.zero_()

    def _append_pages(self, chunk: Chunk) -> SequenceState:
        state = self._states[chunk.slot]
        if chunk.new_pages:
            start = len(state.pages)
            state.pages += chunk.new_pages
            self.page_table[chunk.slot, start : len(state.pages)] = torch.tensor(chunk.new_pages, dtype=torch.int32)
        return state
