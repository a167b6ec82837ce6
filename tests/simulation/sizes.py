"""The sizes and rules of a world."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS, StepCosts
from aiakq.runtime.speculation.methods import DRAFT_MODEL

#: Draft tokens take no time, so that there are as many as possible.
_FREE = StepCosts({1: 1.0, 1000: 1.0})


def _speculation(draw: random.Random) -> SpeculationConfig:
    """Draft tokens are proposed by the executor."""
    return SpeculationConfig(
        method=DRAFT_MODEL,
        model="model",
        num_speculative_tokens=draw.choice([1, 3, 6]),
        disable_by_batch_size=draw.choice([2, 100]),
    )


@dataclass
class Setup:
    """The sizes of a world."""

    page_size: int
    num_pages: int
    max_len: int
    caching: bool
    ahead: bool
    scheduler: SchedulerConfig
    clients: int
    arriving: float
    aborting: float
    resetting: float
    #: Clients of the server, to whom the requests belong.
    owners: int = 1
    #: Of a pipeline.
    stages: int = 1
    #: Of steps with draft tokens.
    costs: StepCosts = DEFAULT_COSTS
    max_rows: int = 100

    @property
    def drafts(self) -> int:
        """Maximum number of draft tokens of a sequence in a step."""
        speculation = self.scheduler.speculation
        return 0 if speculation is None else speculation.num_speculative_tokens

    @staticmethod
    def drawn(draw: random.Random, owners: int = 1, stages: int = 1) -> Setup:
        page_size = draw.choice([1, 2, 4, 4, 4, 8, 16])
        max_len = draw.choice([12, 24, 24, 40])
        pages = -(-max_len // page_size)
        chunked = draw.random() < 0.8
        partial_prefills = draw.choice([1, 1, 3]) if chunked else 1
        # From a famine, in which one request of the greatest length just fits, to plenty.
        num_pages = 1 + pages + draw.choice([0, 0, 1, pages // 2, pages, 3 * pages])
        max_num_seqs = draw.choice([1, 2, 4, 8])
        budget = draw.choice([1, 3, 8, 16, 64]) if chunked else draw.choice([max_len, 2 * max_len])
        setup = Setup(
            page_size=page_size,
            num_pages=num_pages,
            max_len=max_len,
            caching=draw.random() < 0.75,
            ahead=draw.random() < 0.5 and stages == 1,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                enable_chunked_prefill=chunked,
                max_num_partial_prefills=partial_prefills,
                num_stages=stages,
                max_long_partial_prefills=draw.randint(1, partial_prefills),
                long_prompt_tokens=draw.choice([0, 0, 6]),
                long_prefill_token_threshold=draw.choice([0, 0, 5]),
                scheduler_delay_factor=draw.choice([0.0, 0.0, 0.5, 4.0]),
            ),
            clients=draw.choice([2, 5, 12]),
            arriving=draw.choice([0.1, 0.3, 1.0]),
            aborting=draw.choice([0.0, 0.02, 0.1]),
            resetting=draw.choice([0.0, 0.02, 0.2]),
            owners=owners,
            stages=stages,
        )
        if draw.random() < 0.5:
            setup.scheduler = replace(setup.scheduler, speculation=_speculation(draw))
            setup.costs = draw.choice([_FREE, _FREE, DEFAULT_COSTS])
            setup.max_rows = draw.choice([4, 100])
        return setup

    @property
    def overtaking(self) -> bool:
        """Whether short prompts may overtake long ones."""
        config = self.scheduler
        return bool(config.long_prompt_tokens) and config.max_long_partial_prefills < config.max_num_partial_prefills

    @property
    def max_num_seqs(self) -> int:
        return self.scheduler.max_num_seqs

    @property
    def budget(self) -> int:
        """Tokens per step."""
        return self.scheduler.max_num_batched_tokens
