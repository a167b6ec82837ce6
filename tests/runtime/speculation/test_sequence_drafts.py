"""The draft tokens of one sequence: proposed, verified, or compared with what follows."""

from __future__ import annotations

from aiakq.runtime.protocol.output import DraftCounts
from aiakq.runtime.speculation.draft_length import AcceptanceRate
from aiakq.runtime.speculation.sequence_drafts import SequenceDrafts


class Counting:
    """Proposes the next numbers."""

    calls = 0

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        self.calls += 1
        return [token_ids[-1] + 1 + at for at in range(max_tokens)]


def speculation(proposer: Counting | None = None, initial: float = 0.5) -> SequenceDrafts:
    return SequenceDrafts(proposer, 4, AcceptanceRate(initial))


def test_acceptance_rises_and_falls_with_what_is_verified():
    one = speculation(Counting())
    assert one.propose([1], 9) == [2, 3, 4, 5] and one.propose([1], 2) == [2, 3]
    before = one.rate
    one.observe(2, 2)
    assert one.rate > before
    for _ in range(9):
        one.observe(2, 0)
    assert one.rate < 0.1


def test_tokens_that_are_not_verified_are_compared_with_what_follows():
    proposer = Counting()
    one = speculation(proposer, initial=0.1)
    tokens = [1]
    for step in range(1, 30):
        if drafts := one.propose(tokens, 4):
            one.set_aside(tokens, drafts)
        tokens.append(1 + step)
    assert one.rate > 0.9, "what was proposed came"
    assert proposer.calls < 10, "not in every step"


def test_pauses_between_proposals_grow_until_one_is_accepted():
    proposer = Counting()
    one = speculation(proposer)
    tokens = [1]
    for _ in range(200):
        if len(tokens) >= one.due_at and (drafts := one.propose(tokens, 4)):
            one.set_aside(tokens, drafts)
        tokens.append(0)
    assert 6 <= proposer.calls <= 10, "about one in 28 steps at last"
    for step in range(60):
        if drafts := one.propose(tokens, 4):
            one.set_aside(tokens, drafts)
        tokens.append(1 + step)
    assert one.rate > 0.9 and one.due_at <= len(tokens) + 4


def test_where_nothing_is_found_the_search_pauses():
    class Nothing(Counting):
        def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
            self.calls += 1
            return []

    proposer = Nothing()
    one = speculation(proposer)
    for length in range(1, 100):
        one.propose([1] * length, 4)
    assert proposer.calls <= 9


def test_without_a_proposer_only_what_was_received_is_due():
    one = speculation()
    assert one.due_at > 2**32
    one.receive(3, [7], is_forced=True, is_late=False)
    assert one.due_at <= 3 and one.propose([1, 2, 3], 4) == [7]
    assert one.propose([1, 2, 3, 7], 4) == [] and one.due_at > 2**32


def test_a_new_sequence_starts_with_the_acceptance_of_the_others():
    overall = AcceptanceRate()
    first = SequenceDrafts(Counting(), 4, overall)
    for _ in range(100):
        first.propose([1], 4)
        first.observe(4, 0)
    assert SequenceDrafts(Counting(), 4, overall).proposer_rate < 0.1


def test_proposals_of_the_executor_are_used_only_where_they_belong():
    one = speculation()
    one.receive(3, [7, 8], is_forced=False, is_late=False)
    assert one.propose([1, 2, 3], 1) == [7]
    assert one.propose([1, 2, 3], 4) == []
    one.receive(3, [7, 8], is_forced=False, is_late=False)
    assert one.propose([1, 2, 3, 4], 4) == [], "another step came between"
    one.receive(4, [7, 8], is_forced=False, is_late=True)
    assert one.propose([1, 2, 3, 4], 4) == []


def test_forced_tokens_have_an_acceptance_of_their_own():
    one = speculation(initial=0.1)
    one.receive(1, [7], is_forced=True, is_late=False)
    one.propose([1], 4)
    assert one.rate > 0.8 and one.proposer_rate < 0.2


def test_a_model_reads_the_outputs_that_it_missed():
    one = speculation()
    assert one.model_read(40, num_prompt=39) == 0, "prompts are not missed"
    assert one.model_read(42, num_prompt=39) == 0
    assert one.model_read(80, num_prompt=39) == 80 - 42 - 1 - one.max_length


def test_steps_wait_for_tokens_only_while_drafts_are_accepted():
    one = speculation(Counting())
    assert one.expects_drafts
    for _ in range(20):
        one.propose([1], 4)
        one.observe(4, 0)
    assert not one.expects_drafts
    tokens = [1]
    for step in range(1, 60):
        one.compare_ahead(tokens)
        tokens.append(1 + step)
    assert one.expects_drafts, "what would have been proposed came"


def test_accepted_tokens_are_counted_by_position():
    counts = DraftCounts()
    for num_drafts, num_accepted in ((3, 2), (1, 1), (4, 0)):
        counts.observe(num_drafts, num_accepted)
    before = counts.copy()
    counts.observe(2, 2)
    assert before == DraftCounts(3, 8, 3, [2, 1, 0, 0]) and counts == DraftCounts(4, 10, 5, [3, 2, 0, 0])
    assert before + DraftCounts(1, 5, 5, [1, 1, 1, 1, 1]) == DraftCounts(4, 13, 8, [3, 2, 1, 1, 1])
