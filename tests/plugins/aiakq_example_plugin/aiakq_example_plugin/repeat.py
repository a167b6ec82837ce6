"""A method of speculative decoding: the last token is proposed again, as often as it occurred in a row."""

from __future__ import annotations

from aiakq.runtime.speculation.config import SpeculationConfig


class RepeatProposer:
    """See ``Proposer`` in aiakq/runtime/speculation/proposers.py. It keeps nothing of a sequence, so one serves all."""

    @staticmethod
    def from_config(config: SpeculationConfig) -> RepeatProposer:
        return RepeatProposer()

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> RepeatProposer:
        return self

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        count = 0
        while count < min(max_tokens, len(token_ids)) and token_ids[-1 - count] == token_ids[-1]:
            count += 1
        return token_ids[-1:] * count

    def finish(self, token_ids: list[int]) -> None:
        pass
