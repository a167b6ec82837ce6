"""SequenceDrafts: the draft tokens of one sequence, and what is expected of them."""

from __future__ import annotations

from aiakq.runtime.speculation.draft_budget import DraftBudget
from aiakq.runtime.speculation.draft_length import AcceptanceRate
from aiakq.runtime.speculation.proposers import SequenceProposer

#: While draft tokens do not pay, a proposal is compared with so many tokens that are sampled anyway.
_COMPARED_TOKENS = 4
#: Maximum number of tokens between two proposals that are only compared.
_MAX_PAUSE = 24
#: A number of tokens that no sequence has.
_NEVER = 2**62
#: Expected accepted tokens per step from which on steps wait for the tokens that draft tokens follow.
_MIN_EXPECTED = 0.25
_EXPECTED_WEIGHT = 0.1


class SequenceDrafts:
    """The draft tokens of one sequence.

    proposer                its own; None: the executor proposes, if anything does.
    num_speculative_tokens  maximum number of draft tokens in a step.
    overall                 acceptance of all sequences, with which a new one starts.
    budget                  of the engine, which is credited for accepted draft tokens.
    due_at                  number of tokens from which on ``propose`` is worth a call: where nothing is proposed or
                            accepted, the pauses between proposals double.
    """

    def __init__(
        self,
        proposer: SequenceProposer | None,
        num_speculative_tokens: int,
        overall: AcceptanceRate,
        budget: DraftBudget | None = None,
    ) -> None:
        self._budget = budget or DraftBudget()
        self._proposer = proposer
        self.max_length = num_speculative_tokens
        self._overall = overall
        self._rate = AcceptanceRate(overall.value)
        self._forced_rate = AcceptanceRate(0.9)
        self._current = self._rate  # that of the last proposal
        self._received: tuple[int, list[int], bool] | None = None  # number of tokens before them, and if forced
        self._unverified: tuple[int, list[int]] | None = None  # number of tokens before a proposal, and the proposal
        self.due_at = _NEVER if proposer is None else 0
        self._pause = 0
        self._expected = 2 * _MIN_EXPECTED
        self._num_read = 0  # tokens that a draft model has read

    @property
    def rate(self) -> float:
        """Acceptance of the tokens that ``propose`` returned last."""
        return self._current.value

    @property
    def has_received(self) -> bool:
        """Whether the executor proposed what ``propose`` will return: it takes no search."""
        return self._received is not None

    @property
    def proposer_rate(self) -> float:
        """Acceptance of what the proposer proposes, without forced tokens of a grammar."""
        return self._rate.value

    @property
    def expects_drafts(self) -> bool:
        """Whether so many draft tokens are accepted that a step should wait for the tokens before them."""
        return self._expected >= _MIN_EXPECTED

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """At most ``max_tokens`` draft tokens to follow ``token_ids``: those received from the executor, if any."""
        received, self._received = self._received, None
        if received is not None and received[0] == len(token_ids):
            self._current = self._forced_rate if received[2] else self._rate
            return received[1][:max_tokens]
        if self._proposer is None:
            self.due_at = _NEVER
            return []
        if len(token_ids) < self.due_at:
            return []
        if self._unverified is not None:
            self._compare_unverified(token_ids)
            if self._pause:
                self.due_at = len(token_ids) + self._pause
                return []
        self._current = self._rate
        found = self._proposer.propose(token_ids, min(max_tokens, self.max_length))
        if not found:
            self._expect(0)
            self._pause = min(2 * self._pause + 1, _MAX_PAUSE)
            self.due_at = len(token_ids) + self._pause
        return found

    def set_aside(self, token_ids: list[int], drafts: list[int]) -> None:
        """Do not verify ``drafts``, which were proposed to follow ``token_ids``, but compare them with what follows.
        That costs nothing, and shows when they would be accepted again.
        """
        if self._proposer is not None and self._current is self._rate:
            self._unverified = len(token_ids), drafts
            self.due_at = len(token_ids) + _COMPARED_TOKENS

    def compare_ahead(self, token_ids: list[int]) -> None:
        """The same while the token after ``token_ids`` is pending, so that nothing can be verified."""
        drafts = self.propose(token_ids, self.max_length)
        if drafts:
            self.set_aside(token_ids, drafts)

    def _compare_unverified(self, token_ids: list[int]) -> None:
        assert self._unverified is not None
        (start, drafts), self._unverified = self._unverified, None
        following = token_ids[start : start + len(drafts)]
        count = 0
        while count < len(following) and following[count] == drafts[count]:
            count += 1
        if following:
            self._current = self._rate
            self._observe(len(following), count)
        if not count:
            self._pause = min(2 * self._pause + 2 * _COMPARED_TOKENS, _MAX_PAUSE)

    def model_read(self, num_tokens: int, num_prompt: int) -> int:
        """A draft model reads the sequence up to ``num_tokens``. Returns how many of its outputs it had missed, because
        it did not propose anything meanwhile.
        """
        num_missed = max(0, num_tokens - max(self._num_read, num_prompt) - 1 - self.max_length)
        self._num_read = num_tokens
        return num_missed

    def expect_none(self) -> None:
        """A model proposes nothing in this step."""
        self._expect(0)

    def receive(self, num_tokens: int, drafts: list[int], is_forced: bool, is_late: bool) -> None:
        """Take the draft tokens that the executor proposed to follow the first ``num_tokens``, perhaps none.

        is_forced  a grammar forces them.
        is_late    the next token is pending already.
        """
        if is_late or not drafts:
            self._expect(self._forced_rate.value * len(drafts))
        else:
            self._received = num_tokens, drafts, is_forced
            self.due_at = 0

    def finish(self, token_ids: list[int]) -> None:
        """The sequence has ended, with ``token_ids``."""
        if self._proposer is not None:
            self._proposer.finish(token_ids)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """``num_accepted`` of the last ``num_drafts`` draft tokens were accepted in a verification."""
        self._budget.credit(num_accepted)
        self._observe(num_drafts, num_accepted)

    def _observe(self, num_drafts: int, num_accepted: int) -> None:
        self._current.observe(num_drafts, num_accepted)
        if self._current is self._rate:
            self._overall.observe(num_drafts, num_accepted, 0.95)
        self._expect(num_accepted)
        if num_accepted:
            self._pause = 0

    def _expect(self, num_accepted: float) -> None:
        self._expected += _EXPECTED_WEIGHT * (num_accepted - self._expected)
