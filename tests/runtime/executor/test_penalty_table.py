"""PenaltyTable: the same logits as penalties row by row, while tokens are appended and others count them."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.runtime.executor import penalties
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


@pytest.mark.parametrize("appended", [1, 60])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_between_counting_and_writing_is_made_up_for(failing, appended, monkeypatch):
    """One token is written into the table, and sixty need a new one; then the step runs again."""
    rows = [(penalties_of(PARAMS[1], [5, 9, 5]), [5, 9, 5]), (penalties_of(PARAMS[2], [7]), [7])]
    table = PenaltyTable(rows, VOCAB, torch.device("cpu"))
    on_device, calls = penalties.on_device, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == failing:
            raise torch.OutOfMemoryError
        return on_device(*arguments)

    for _, tokens in rows:
        tokens += range(20, 20 + appended)
    monkeypatch.setattr(penalties, "on_device", once)
    with pytest.raises(torch.OutOfMemoryError):
        table.follow()
    table.follow()
    fresh = PenaltyTable(
        [(penalties_of(PARAMS[1], [5, 9, 5]), rows[0][1]), (penalties_of(PARAMS[2], [7]), rows[1][1])],
        VOCAB,
        torch.device("cpu"),
    )
    logits = torch.randn(3, VOCAB)
    expected = logits.clone()
    table.penalize(logits)
    fresh.penalize(expected)
    assert torch.equal(logits[:2], expected[:2])
