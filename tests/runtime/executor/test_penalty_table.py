"""PenaltyTable: the same logits as penalties row by row, while tokens are appended and others count them."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.runtime.executor.penalties import Penalties, PenaltyTable
from aiakq.runtime.executor.row_transforms import Outputs
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams

VOCAB = 120
PARAMS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "presence_penalty": 1.1},
]


def penalties_of(params, prompt) -> Penalties:
    found = Penalties.of(RequestSpec("r", prompt, SamplingParams(**params), 9, 0))
    assert found is not None
    return found


@pytest.mark.parametrize("params", [PARAMS, PARAMS[1:2] * 3])
def test_the_table_gives_what_each_row_gives_alone(params):
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB) for _ in range(size)] for size in (1, 30, 90)]
    tokens = [list(prompt) for prompt in prompts]
    kept = [penalties_of(*pair) for pair in zip(params, prompts, strict=True)]
    table = PenaltyTable(list(zip(kept, tokens, strict=True)), VOCAB, torch.device("cpu"))
    for step in range(80):  # more than the spare places
        logits = torch.randn(4, VOCAB)
        expected = logits.clone()
        for row, prompt in enumerate(prompts):
            alone = penalties_of(params[row], prompt)
            alone.apply(expected[row], Outputs(tokens[row][len(prompt) :], 0))
        table.penalize(logits)
        assert torch.equal(logits[:3], expected[:3]), step
        for own in tokens:
            own += [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 1, 1, 2]))]
        if step % 30 == 10:  # a step without the table
            kept[1].occurred(Outputs(tokens[1][len(prompts[1]) :], 0))
        table.follow()
