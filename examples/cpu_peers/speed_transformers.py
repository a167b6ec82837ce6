"""Measure transformers."""

from __future__ import annotations

import time
from typing import Any

import torch
from timing import run
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Records the time of each token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generator:
    """Any model with transformers' ``generate``."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        ids, clock = torch.tensor(prompts), Clock()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        assert len(clock.times) == tokens
        return clock.times[0], clock.times[-1]


def load(request: dict[str, Any]) -> Generator:
    torch.set_num_threads(request["threads"])
    dtype = getattr(torch, request["dtype"])
    return Generator(AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval())


if __name__ == "__main__":
    run(("torch", "transformers"), load)
