"""DraftPlanner: adds draft tokens to steps where they pay. The part of speculative decoding in the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.resources import StepExtension
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.protocol.command import EnableDrafts, ExecutorCommand
from aiakq.runtime.protocol.step import ChunkResult
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.draft_budget import DraftBudget
from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS, MAX_RATE, AcceptanceRate, choose_lengths
from aiakq.runtime.speculation.proposers import proposer_of
from aiakq.runtime.speculation.sequence_drafts import SequenceDrafts

#: More steps than any sequence takes.
_ALWAYS = 2**62


class DraftPlanner(StepExtension):
    """Chooses which sequences of a step get draft tokens, and how many.

    proposer     of draft tokens; None: the executor proposes them.
    costs        of steps by their number of tokens, from which draft lengths are chosen.
    max_rows     rows of logits in a step with draft tokens.
    budget       tokens in a step.
    is_enabled   changed by ``EnableDrafts``.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig, speculation: SpeculationConfig) -> None:
        self.proposer = proposer_of(speculation)
        self.costs = DEFAULT_COSTS
        self.max_rows = config.max_rows
        self.budget = config.max_num_batched_tokens
        self.is_enabled = True
        self._pool = pool
        self._config = speculation
        self._num_stages = config.num_stages
        self._acceptance = AcceptanceRate()
        self._draft_budget = DraftBudget()
        self._num_steps = 0  # since the budget earned last
        self._num_idle_steps = 0  # how many of the next steps of the same sequences need not look for draft tokens
        self._drafts: dict[Sequence, SequenceDrafts] = {}
        self._commands: list[ExecutorCommand] = []

    def drafts_of(self, sequence: Sequence) -> SequenceDrafts:
        """Return the draft tokens of a sequence."""
        return self._drafts[sequence]

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {EnableDrafts: self._enable}

    def _enable(self, command: EnableDrafts) -> None:
        self.is_enabled = command.enabled
        self.proposer = proposer_of(self._config)
        self._commands.append(command)

    def commands(self) -> list[ExecutorCommand]:
        commands, self._commands = self._commands, []
        return commands

    def add(self, sequence: Sequence) -> None:
        shared = self.proposer
        proposer = None if shared is None else shared.new_sequence(sequence.scope, sequence.num_prompt)
        length = self._config.num_speculative_tokens
        self._drafts[sequence] = SequenceDrafts(proposer, length, self._acceptance, self._draft_budget)

    def acquire(self, sequence: Sequence) -> None:
        self._num_idle_steps = 0

    def release(self, sequence: Sequence) -> None:
        self._num_idle_steps = 0

    def remove(self, sequence: Sequence) -> None:
        self._drafts.pop(sequence).finish(sequence.token_ids)

    def commit(self, chunk: ScheduledChunk, result: ChunkResult, num_drafts: int) -> None:
        sequence, drafts = chunk.sequence, self._drafts[chunk.sequence]
        if num_drafts:
            drafts.observe(num_drafts, len(chunk.drafts))
        if chunk.num_proposed or chunk.num_forced:
            is_late = sequence.num_pending_tokens > 0
            drafts.receive(len(sequence.token_ids), result.proposed, result.is_forced, is_late)

    def awaits_results(self, running: list[Sequence]) -> bool:
        """Draft tokens follow tokens that are known: the next step waits where a pending one has some, or it may."""
        if self._num_stages > 1:
            return False
        for sequence in running:
            if any(chunk.drafts or chunk.num_proposed for chunk in sequence.pending_chunks):
                return True
        if not self.is_enabled:
            return False
        num, length = len(running), self._config.num_speculative_tokens
        if num >= self._config.disable_by_batch_size or self.costs.min_acceptance(num, num, length) > MAX_RATE:
            return False
        return any(one.num_pending_tokens and self._drafts[one].expects_drafts for one in running)

    def extend(self, chosen: list[ScheduledChunk], running: list[Sequence], has_prompts: bool) -> None:
        """Append draft tokens to the decodes among ``chosen`` where they pay, while budget, pages and rows of logits
        last. No sequence is preempted for them.
        """
        config = self._config
        if not self.is_enabled or len(running) >= config.disable_by_batch_size:
            return
        self._num_steps += 1
        is_complete = len(chosen) == len(running)
        if self._num_idle_steps > 0 and is_complete:
            self._num_idle_steps -= 1
            return
        due = [one for one in chosen if one.count == 1 and self._is_due(one.sequence)]
        pays = not due or self._add_proposals(chosen, due, len(running))
        has_model = config.model is not None
        asking = [one for one in chosen if (has_model or one.sequence.spec.grammar is not None) and one.samples]
        if asking:
            self._request_drafts(asking, len(running))
        elif is_complete and not has_model and not has_prompts:
            self._num_idle_steps = self._steps_until_due(running) if pays else _ALWAYS

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether it is worth a look if there are draft tokens to follow its last token."""
        return len(sequence.token_ids) >= self._drafts[sequence].due_at

    def _steps_until_due(self, running: list[Sequence]) -> int:
        """How many of the following steps cannot have draft tokens, if the same sequences run: a step adds a token to
        each that has none.
        """
        first = min((self._drafts[one].due_at - len(one.token_ids) for one in running), default=0)
        return max(0, first - 1, self._draft_budget.num_steps_until_earned - 1)

    def _add_proposals(self, chosen: list[ScheduledChunk], due: list[ScheduledChunk], num_running: int) -> bool:
        """Append draft tokens to the chunks of ``due``, decodes among ``chosen``, where they pay. False if they would
        not although all were accepted.
        """
        num_decodes = sum(chunk.count == 1 for chunk in chosen)
        num_tokens = sum(chunk.count for chunk in chosen)
        room = min(self.max_rows - sum(chunk.samples for chunk in chosen), self.budget - num_tokens)
        required = self.costs.min_acceptance(num_tokens, num_decodes, self._config.num_speculative_tokens)
        if room <= 0 or required > MAX_RATE:
            return room <= 0
        costs, budget = self.costs, self._draft_budget
        budget.earn(self._num_steps, costs.step(num_decodes), num_decodes)
        self._num_steps = 0
        if budget.is_spent and self.proposer is not None:
            due = [one for one in due if self._drafts[one.sequence].has_received]
        proposals = self._proposals(due, room)
        rates = [drafts.rate for _, drafts, _ in proposals]
        lengths = [0] * len(rates)
        if max(rates, default=0.0) >= required:
            limits = [len(tokens) for _, _, tokens in proposals]
            lengths = choose_lengths(self.costs, num_tokens, num_decodes, rates, limits, room)
        for (chunk, drafts, tokens), length in zip(proposals, lengths, strict=True):
            if length == 0:
                drafts.set_aside(chunk.sequence.token_ids, tokens)
            elif self._grow(chunk.sequence, 1 + length, num_running):
                chunk.add_drafts(tokens[:length])
        verification = costs.step(num_tokens + sum(lengths)) - costs.step(num_tokens)
        budget.charge(verification + len(due) * costs.bookkeeping)
        return True

    def _proposals(
        self, decodes: list[ScheduledChunk], room: int
    ) -> list[tuple[ScheduledChunk, SequenceDrafts, list[int]]]:
        """The draft tokens that are proposed for ``decodes``, where there are any."""
        proposals = []
        for chunk in decodes:
            sequence, drafts = chunk.sequence, self._drafts[chunk.sequence]
            if sequence.num_pending_tokens:
                drafts.compare_ahead(sequence.token_ids)
                continue
            max_tokens = min(room, sequence.max_draft_tokens, self._config.max_model_len - chunk.end)
            tokens = drafts.propose(sequence.token_ids, max_tokens) if max_tokens > 0 else []
            if tokens:
                proposals.append((chunk, drafts, tokens))
        return proposals

    def _request_drafts(self, chunks: list[ScheduledChunk], num_running: int) -> None:
        """Ask the executor to propose draft tokens to follow what ``chunks`` sample: those that a grammar forces, and,
        where it pays, those of a model.
        """
        config = self._config
        asked: list[tuple[ScheduledChunk, SequenceDrafts, int]] = []
        for chunk in chunks:
            drafts, limit = self._drafts[chunk.sequence], chunk.max_requested_drafts(config.max_model_len)
            if limit > 0:
                if chunk.sequence.spec.grammar is not None:
                    chunk.num_forced = min(limit, drafts.max_length)
                asked.append((chunk, drafts, limit))
        if config.model is None or not asked:
            return
        rates = [drafts.proposer_rate for _, drafts, _ in asked]
        limits = [min(limit, drafts.max_length) for _, drafts, limit in asked]
        lengths = self._proposed_lengths(len(chunks), rates, limits)
        for (chunk, drafts, _), length in zip(asked, lengths, strict=True):
            chunk.num_proposed = length
            if length:
                self._grow(chunk.sequence, chunk.count + length, num_running)  # for keys of the draft model
                num_missed = drafts.model_read(chunk.end, chunk.sequence.num_prompt)
                self._draft_budget.charge(self.costs.proposal(1 + num_missed) - self.costs.proposal(1))
            else:
                drafts.expect_none()

    def _proposed_lengths(self, num_decodes: int, rates: list[float], limits: list[int]) -> list[int]:
        """How many tokens a draft model proposes for each sequence: as many as pay, or one to see whether they would.
        None while the budget is spent, or where they would not pay although all were accepted.
        """
        costs, budget = self.costs, self._draft_budget
        budget.earn(self._num_steps, costs.step(num_decodes), num_decodes)
        self._num_steps = 0
        length = self._config.num_speculative_tokens
        required = costs.min_acceptance(num_decodes, num_decodes, length, with_proposals=True)
        room = self.max_rows - num_decodes
        if budget.is_spent or room <= 0 or required > MAX_RATE:
            return [0] * len(rates)
        lengths = choose_lengths(costs, num_decodes, num_decodes, rates, limits, room, with_proposals=True)
        room -= sum(lengths)
        for index, limit in enumerate(limits):
            if not lengths[index] and limit and room > 0:
                lengths[index] = 1
                room -= 1
        steps = (sum(length > depth for length in lengths) for depth in range(max(lengths)))
        budget.charge(sum(map(costs.proposal, steps)))
        return lengths

    def _grow(self, sequence: Sequence, count: int, num_running: int) -> bool:
        """Allocate the pages for ``count`` more tokens, but not the last one that a running sequence could need."""
        num_tokens = sequence.num_computed_tokens + count
        needed = self._pool.pages_for(num_tokens) - len(sequence.pages)
        if needed > 0 and self._pool.num_free - needed < num_running:
            return False
        return self._pool.extend(sequence.pages, num_tokens)
