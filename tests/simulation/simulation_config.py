"""The sizes and limits of a simulation."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS, StepCosts
from aiakq.runtime.speculation.methods import DRAFT_MODEL

#: Draft tokens cost nothing, so that the planner proposes as many as possible.
_FREE_DRAFTS = StepCosts({1: 1.0, 1000: 1.0})


@dataclass
class SimulationConfig:
    """The sizes and limits of a simulation.

    max_unfinished    requests at a time.
    arrival_rate      probability per step that a request arrives; abort_rate and reset_rate likewise.
    num_clients       clients of the server, to whom the requests belong.
    num_stages        of a pipeline.
    step_costs        by which draft tokens are planned; max_rows limits them.
    min_columns       number of steady sequences from which on a step has columns.
    """

    page_size: int
    num_pages: int
    max_len: int
    caching: bool
    async_scheduling: bool
    scheduler: SchedulerConfig
    max_unfinished: int = 100
    arrival_rate: float = 1.0
    abort_rate: float = 0.0
    reset_rate: float = 0.0
    num_clients: int = 1
    num_stages: int = 1
    step_costs: StepCosts = DEFAULT_COSTS
    max_rows: int = 100
    min_columns: int = 1

    @staticmethod
    def sample(rng: random.Random, num_clients: int = 1, num_stages: int = 1) -> SimulationConfig:
        page_size = rng.choice([1, 2, 4, 4, 4, 8, 16])
        max_len = rng.choice([12, 24, 24, 40])
        pages = -(-max_len // page_size)
        chunked = rng.random() < 0.8
        partial_prefills = rng.choice([1, 1, 3]) if chunked else 1
        # From a pool in which one request of maximum length just fits to one with pages for several.
        num_pages = 1 + pages + rng.choice([0, 0, 1, pages // 2, pages, 3 * pages])
        max_num_seqs = rng.choice([1, 2, 4, 8])
        budget = rng.choice([1, 3, 8, 16, 64]) if chunked else rng.choice([max_len, 2 * max_len])
        config = SimulationConfig(
            page_size=page_size,
            num_pages=num_pages,
            max_len=max_len,
            caching=rng.random() < 0.75,
            async_scheduling=rng.random() < 0.5 and num_stages == 1,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                enable_chunked_prefill=chunked,
                max_num_partial_prefills=partial_prefills,
                num_stages=num_stages,
                max_long_partial_prefills=rng.randint(1, partial_prefills),
                long_prompt_tokens=rng.choice([0, 0, 6]),
                long_prefill_token_threshold=rng.choice([0, 0, 5]),
                scheduler_delay_factor=rng.choice([0.0, 0.0, 0.5, 4.0]),
            ),
            max_unfinished=rng.choice([2, 5, 12]),
            arrival_rate=rng.choice([0.1, 0.3, 1.0]),
            abort_rate=rng.choice([0.0, 0.02, 0.1]),
            reset_rate=rng.choice([0.0, 0.02, 0.2]),
            num_clients=num_clients,
            num_stages=num_stages,
        )
        if rng.random() < 0.5:
            config.scheduler = replace(config.scheduler, speculation=_speculation(rng))
            config.step_costs = rng.choice([_FREE_DRAFTS, _FREE_DRAFTS, DEFAULT_COSTS])
            config.max_rows = rng.choice([4, 100])
        config.min_columns = rng.choice([1, 1, 3, 100])
        return config

    @property
    def max_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence in a step."""
        speculation = self.scheduler.speculation
        return 0 if speculation is None else speculation.num_speculative_tokens

    @property
    def allows_overtaking(self) -> bool:
        """Whether short prompts may overtake long ones."""
        config = self.scheduler
        return bool(config.long_prompt_tokens) and config.max_long_partial_prefills < config.max_num_partial_prefills

    @property
    def max_num_seqs(self) -> int:
        return self.scheduler.max_num_seqs

    @property
    def token_budget(self) -> int:
        """Tokens per step."""
        return self.scheduler.max_num_batched_tokens


def _speculation(rng: random.Random) -> SpeculationConfig:
    """The executor proposes draft tokens, as with a draft model."""
    return SpeculationConfig(
        method=DRAFT_MODEL,
        model="model",
        num_speculative_tokens=rng.choice([1, 3, 6]),
        disable_by_batch_size=rng.choice([2, 100]),
    )
