"""Proposers of draft tokens: the protocol.

A proposer sees the tokens of sequences, nothing else, and runs in the scheduler: it must be fast and deterministic.
What needs a model runs in the executor, as a ``ModelProposer`` (aiakq/runtime/executor/model_proposer.py). Forced
tokens of a grammar are proposed by the sequence's matcher (aiakq/runtime/structured/matcher.py), whatever the method
is.
"""

from __future__ import annotations

from typing import Protocol

from aiakq.runtime.speculation.config import SpeculationConfig


class SequenceProposer(Protocol):
    """The draft tokens of one sequence."""

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """At most ``max_tokens`` draft tokens to follow ``token_ids``, which only grow from call to call. Not called in
        every step.
        """

    def finish(self, token_ids: list[int]) -> None:
        """The sequence has ended, with ``token_ids``."""


class Proposer(Protocol):
    """A method of speculative decoding, for all sequences of an engine."""

    @staticmethod
    def from_config(config: SpeculationConfig) -> Proposer:
        """The proposer with the settings of ``config``."""

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> SequenceProposer:
        """The proposer of a new sequence, whose first ``num_prompt_tokens`` are its prompt.

        scope  what sequences may learn from each other: only those of the same cache salt, API key and adapter have the
               same one.
        """


def proposer_of(config: SpeculationConfig | None) -> Proposer | None:
    """The proposer of ``config``; None without one, or where the executor proposes. Raises ``plugin``."""
    if config is None or config.model is not None:
        return None
    proposer: Proposer = config.load_method().from_config(config)
    return proposer
