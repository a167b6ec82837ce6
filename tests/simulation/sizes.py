"""The sizes and rules of a world."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aiakq.runtime.engine.scheduler import PromptRules


@dataclass
class Setup:
    """The sizes of a world."""

    page_size: int
    num_pages: int
    max_len: int
    max_num_seqs: int
    budget: int
    caching: bool
    ahead: bool
    rules: PromptRules
    clients: int
    arriving: float
    aborting: float
    resetting: float

    @staticmethod
    def drawn(draw: random.Random) -> Setup:
        page_size = draw.choice([1, 2, 4, 4, 4, 8, 16])
        max_len = draw.choice([12, 24, 24, 40])
        pages = -(-max_len // page_size)
        chunked = draw.random() < 0.8
        together = draw.choice([1, 1, 3]) if chunked else 1
        return Setup(
            page_size=page_size,
            # From a famine, in which one request of the greatest length just fits, to plenty.
            num_pages=1 + pages + draw.choice([0, 0, 1, pages // 2, pages, 3 * pages]),
            max_len=max_len,
            max_num_seqs=draw.choice([1, 2, 4, 8]),
            budget=draw.choice([1, 3, 8, 16, 64]) if chunked else draw.choice([max_len, 2 * max_len]),
            caching=draw.random() < 0.75,
            ahead=draw.random() < 0.5,
            rules=PromptRules(
                chunked=chunked,
                together=together,
                long_together=draw.randint(1, together),
                long_prompt=draw.choice([0, 0, 6]),
                long_chunk=draw.choice([0, 0, 5]),
                delay=draw.choice([0.0, 0.0, 0.5, 4.0]),
            ),
            clients=draw.choice([2, 5, 12]),
            arriving=draw.choice([0.1, 0.3, 1.0]),
            aborting=draw.choice([0.0, 0.02, 0.1]),
            resetting=draw.choice([0.0, 0.02, 0.2]),
        )

    @property
    def overtaking(self) -> bool:
        """Whether short prompts may overtake long ones."""
        return bool(self.rules.long_prompt) and self.rules.long_together < self.rules.together
