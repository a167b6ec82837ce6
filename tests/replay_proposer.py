"""A proposer that knows the output, for tests of speculative decoding: every accept length occurs."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

from aiakq import LLM
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.planner import DraftPlanner

#: Draft tokens cost nothing, so that as many as possible are proposed, whatever the load of this machine.
FREE = StepCosts({1: 1.0, 1000: 1.0})


class Replay:
    """Proposes the known output, corrupted at random positions."""

    def __init__(self, known: Iterable[list[int]], mistakes: float) -> None:
        self._draw = random.Random(3)
        self._mistakes = mistakes
        self._after: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for tokens in known:
            self._after[tuple(tokens[:1])].append(tokens)

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> Replay:
        return self

    def finish(self, token_ids: list[int]) -> None:
        pass

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        same = [one for one in self._after[tuple(token_ids[:1])] if one[: len(token_ids)] == token_ids]
        if not same:
            return []
        found = self._draw.choice(same)[len(token_ids) : len(token_ids) + self._draw.randint(1, max_tokens)]
        return [token if self._draw.random() > self._mistakes else self._draw.randrange(300) for token in found]


def planner_of(llm: LLM) -> DraftPlanner:
    """Return the planner of draft tokens, which must exist."""
    planner = llm.engine.scheduler.resource(DraftPlanner)
    assert planner is not None
    return planner


def replaying(llm: LLM, known: Iterable[list[int]], mistakes: float) -> LLM:
    """``llm`` with draft tokens from ``known``, which are prompts with their outputs, in any number of rows."""
    planner = planner_of(llm)
    planner.costs, planner.max_rows = FREE, 100
    planner.proposer = Replay(known, mistakes)
    return llm
