"""DraftScheduling: the part of the scheduler that adds draft tokens to a step."""

from __future__ import annotations

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.config.speculation import SpeculationConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.speculation.draft_budget import DraftBudget
from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS, MAX_RATE, AcceptanceRate, choose_lengths
from aiakq.runtime.speculation.proposers import proposer_of
from aiakq.runtime.speculation.speculation import Speculation

#: More steps than any sequence takes.
_ALWAYS = 2**62


class DraftScheduling:
    """Running sequences over a page pool, and their draft tokens.

    proposer     of draft tokens; None: there are none, or the executor proposes them.
    costs        of steps by their number of tokens, from which draft lengths are chosen.
    max_rows     rows of logits in a step with draft tokens.
    budget       tokens in a step.
    drafts_enabled  changed by benchmarks between runs, to compare with the same engine without draft tokens.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.config = config
        self.proposer = proposer_of(config.speculation)
        self.costs = DEFAULT_COSTS
        self.max_rows = config.max_rows
        self.budget = config.max_num_batched_tokens
        self.drafts_enabled = True
        self.running: list[Sequence] = []
        self._had_prompts = False
        self._acceptance = AcceptanceRate()
        self._draft_budget = DraftBudget()
        self._num_steps = 0  # since the budget earned last
        self._num_idle_steps = 0  # how many of the next steps of the same sequences need not look for draft tokens

    def _new_speculation(self, sequence: Sequence, config: SpeculationConfig) -> Speculation:
        """The draft tokens of a new sequence."""
        shared = self.proposer
        proposer = None if shared is None else shared.new_sequence(sequence.scope, sequence.num_prompt)
        return Speculation(proposer, config.num_speculative_tokens, self._acceptance, self._draft_budget)

    def awaits_results(self) -> bool:
        """Whether the next step needs the results of pending ones, because it follows draft tokens or may have some."""
        config = self.config.speculation
        if config is None or not self.drafts_enabled or self.config.num_stages > 1:
            return False
        for sequence in self.running:
            if any(chunk.drafts or chunk.num_proposed for chunk in sequence.pending_chunks):
                return True
        num, length = len(self.running), config.num_speculative_tokens
        if num >= config.disable_by_batch_size or self.costs.min_acceptance(num, num, length) > MAX_RATE:
            return False
        return any(
            one.num_pending_tokens and one.speculation is not None and one.speculation.expects_drafts
            for one in self.running
        )

    def _add_drafts(self, chosen: list[ScheduledChunk], config: SpeculationConfig) -> None:
        """Append draft tokens to the decodes among ``chosen`` where they pay, while budget, pages and rows of logits
        last. No sequence is preempted for them.
        """
        if len(self.running) >= config.disable_by_batch_size:
            return
        self._num_steps += 1
        is_complete = len(chosen) == len(self.running)
        if self._num_idle_steps > 0 and is_complete:
            self._num_idle_steps -= 1
            return
        due = [chunk for chunk in chosen if chunk.count == 1 and chunk.sequence.may_have_drafts]
        pays = not due or self._add_proposals(chosen, due, config)
        has_model = config.model is not None
        asking = [one for one in chosen if (has_model or one.sequence.spec.grammar is not None) and one.samples]
        if asking:
            self._request_drafts(asking, config)
        elif is_complete and not has_model and not self._had_prompts:
            self._num_idle_steps = self._steps_until_due() if pays else _ALWAYS

    def _steps_until_due(self) -> int:
        """How many of the following steps cannot have draft tokens, if the same sequences run: a step adds a token to
        each that has none.
        """
        first = min(
            (one.speculation.due_at - len(one.token_ids) for one in self.running if one.speculation is not None),
            default=0,
        )
        return max(0, first - 1, self._draft_budget.num_steps_until_earned - 1)

    def _add_proposals(
        self, chosen: list[ScheduledChunk], due: list[ScheduledChunk], config: SpeculationConfig
    ) -> bool:
        """Append draft tokens to the chunks of ``due``, decodes among ``chosen``, where they pay. False if they would
        not although all were accepted.
        """
        num_decodes = sum(chunk.count == 1 for chunk in chosen)
        num_tokens = sum(chunk.count for chunk in chosen)
        room = min(self.max_rows - sum(chunk.samples for chunk in chosen), self.budget - num_tokens)
        required = self.costs.min_acceptance(num_tokens, num_decodes, config.num_speculative_tokens)
        if room <= 0 or required > MAX_RATE:
            return room <= 0
        costs, budget = self.costs, self._draft_budget
        budget.earn(self._num_steps, costs.step(num_decodes), num_decodes)
        self._num_steps = 0
        if budget.is_spent and self.proposer is not None:
            due = [one for one in due if one.sequence.speculation is not None and one.sequence.speculation.has_received]
        proposals = self._proposals(due, room, config)
        rates = [speculation.rate for _, speculation, _ in proposals]
        lengths = [0] * len(rates)
        if max(rates, default=0.0) >= required:
            limits = [len(drafts) for _, _, drafts in proposals]
            lengths = choose_lengths(self.costs, num_tokens, num_decodes, rates, limits, room)
        for (chunk, speculation, drafts), length in zip(proposals, lengths, strict=True):
            if length == 0:
                speculation.set_aside(chunk.sequence.token_ids, drafts)
            elif self._grow_for_drafts(chunk.sequence, 1 + length):
                chunk.add_drafts(drafts[:length])
        verification = costs.step(num_tokens + sum(lengths)) - costs.step(num_tokens)
        budget.charge(verification + len(due) * costs.bookkeeping)
        return True

    def _proposals(
        self, decodes: list[ScheduledChunk], room: int, config: SpeculationConfig
    ) -> list[tuple[ScheduledChunk, Speculation, list[int]]]:
        """The draft tokens that are proposed for ``decodes``, where there are any."""
        proposals = []
        for chunk in decodes:
            sequence, speculation = chunk.sequence, chunk.sequence.speculation
            assert speculation is not None
            if sequence.num_pending_tokens:
                speculation.compare_ahead(sequence.token_ids)
                continue
            max_tokens = min(room, sequence.max_draft_tokens, config.max_model_len - chunk.end)
            drafts = speculation.propose(sequence.token_ids, max_tokens) if max_tokens > 0 else []
            if drafts:
                proposals.append((chunk, speculation, drafts))
        return proposals

    def _request_drafts(self, chunks: list[ScheduledChunk], config: SpeculationConfig) -> None:
        """Ask the executor to propose draft tokens to follow what ``chunks`` sample: those that a grammar forces, and,
        where it pays, those of a model.
        """
        asked: list[tuple[ScheduledChunk, Speculation, int]] = []
        for chunk in chunks:
            speculation, limit = chunk.sequence.speculation, chunk.max_requested_drafts(config.max_model_len)
            if speculation is not None and limit > 0:
                if chunk.sequence.spec.grammar is not None:
                    chunk.num_forced = min(limit, speculation.max_length)
                asked.append((chunk, speculation, limit))
        if config.model is None or not asked:
            return
        rates = [speculation.proposer_rate for _, speculation, _ in asked]
        limits = [min(limit, speculation.max_length) for _, speculation, limit in asked]
        lengths = self._proposed_lengths(len(chunks), rates, limits, config)
        for (chunk, speculation, _), length in zip(asked, lengths, strict=True):
            chunk.num_proposed = length
            if length:
                self._grow_for_drafts(chunk.sequence, chunk.count + length)  # for keys of the draft model
                num_missed = speculation.model_read(chunk.end, chunk.sequence.num_prompt)
                self._draft_budget.charge(self.costs.proposal(1 + num_missed) - self.costs.proposal(1))
            else:
                speculation.expect_none()

    def _proposed_lengths(
        self, num_decodes: int, rates: list[float], limits: list[int], config: SpeculationConfig
    ) -> list[int]:
        """How many tokens a draft model proposes for each sequence: as many as pay, or one to see whether they would.
        None while the budget is spent, or where they would not pay although all were accepted.
        """
        costs, budget = self.costs, self._draft_budget
        budget.earn(self._num_steps, costs.step(num_decodes), num_decodes)
        self._num_steps = 0
        required = costs.min_acceptance(num_decodes, num_decodes, config.num_speculative_tokens, with_proposals=True)
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

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate the pages for ``count`` more tokens of ``sequence``; False if there are not enough."""
        needed = self._pages_for(sequence.num_computed_tokens + count) - len(sequence.pages)
        if needed > 0:
            pages = self.pool.allocate(needed)
            if pages is None:
                return False
            sequence.pages += pages
        return True

    def _grow_for_drafts(self, sequence: Sequence, count: int) -> bool:
        """The same for draft tokens, which may not take the last page that a running sequence could need."""
        needed = self._pages_for(sequence.num_computed_tokens + count) - len(sequence.pages)
        if needed > 0 and self.pool.num_free - needed < len(self.running):
            return False
        return self._grow(sequence, count)
