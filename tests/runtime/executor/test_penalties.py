"""Penalties: of all rows of a step together as of each alone, and with the same number of torch operations."""

from __future__ import annotations

import pytest
import torch

from aiakq.bench.counting import CountingMode
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler
from aiakq.runtime.executor import sampler
from aiakq.runtime.executor.penalties import Penalties, TokenCounts, penalize
from aiakq.runtime.executor.row_transforms import Outputs
from aiakq.runtime.executor.sampler import SamplerRow
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NewSequence

VOCAB = 50
#: Parameters, output and draft tokens of rows.
ROWS = [
    ({"repetition_penalty": 1.3}, [4, 4, 7], []),
    ({"frequency_penalty": 0.25}, [], []),
    ({"presence_penalty": -0.5, "frequency_penalty": 0.1}, [9, 9, 9, 3], [3, 8]),
    ({"repetition_penalty": 0.7, "presence_penalty": 1.0}, list(range(20, 45)), [1, 21]),
]


def penalties(**sampling) -> Penalties:
    found = Penalties.of(RequestSpec("r", [1, 2, 2, 4], SamplingParams(max_tokens=9, **sampling), 9, 0))
    assert found is not None
    return found


def formula(logits: torch.Tensor, sampling: dict, outputs: list[int]) -> torch.Tensor:
    """The penalties of one row, token by token."""
    result = logits.clone()
    repetition = sampling.get("repetition_penalty", 1.0)
    for token in {1, 2, 4, *outputs}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(outputs):
        result[token] -= sampling.get("frequency_penalty", 0.0) * outputs.count(token)
        result[token] -= sampling.get("presence_penalty", 0.0)
    return result


def test_rows_are_penalized_together_as_each_alone():
    logits = torch.randn(len(ROWS) + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 4] = float("-inf")
    together, occurred = logits.clone(), {}
    for row, (sampling, outputs, drafts) in enumerate(ROWS, 1):
        given = Outputs([*outputs, *drafts], len(drafts))
        occurred[row] = penalties(**sampling).occurred(given)
        alone = logits[row].clone()
        penalties(**sampling).apply(alone, given)
        torch.testing.assert_close(alone, formula(logits[row], sampling, [*outputs, *drafts]))
        logits[row] = alone
    penalize(together, occurred)
    assert torch.equal(together, logits)


def test_draft_tokens_are_forgotten_where_they_are_rejected():
    made = penalties(frequency_penalty=1.0, repetition_penalty=2.0)
    behind = made.occurred(Outputs([5, 6, 6, 5], 3))
    assert behind.token_ids.tolist() == [1, 2, 4, 5, 6] and behind.counts.tolist() == [0, 0, 0, 2, 2]
    after = made.occurred(Outputs([5, 7, 7, 8], 1))
    assert after.token_ids.tolist() == [1, 2, 4, 5, 7, 8] and after.counts.tolist() == [0, 0, 0, 1, 2, 1]


@pytest.mark.parametrize("count", [1, 16, 17, 1000])
def test_counts_grow(count: int):
    counts = TokenCounts([3, 3, 2**20, 3])
    counts.add([*range(count), *range(count)])
    token_ids, numbers = counts.arrays()
    assert sorted(token_ids.tolist()) == sorted({3, 2**20, *range(count)})
    assert numbers.sum() == 2 * count


def test_a_step_takes_as_many_torch_operations_for_many_rows_as_for_two():
    operations = []
    for count in (2, 60):
        params = SamplingParams(presence_penalty=0.5, temperature=0.7, top_p=0.9, max_tokens=9)
        rows = [
            SamplerRow(SequenceState(NewSequence(0, RequestSpec("r", [1], params, 9, row), [4, 5])), [])
            for row in range(count)
        ]
        with CountingMode() as mode:
            sampler.sample(TorchSampler(CANDIDATES), torch.randn(count, VOCAB), rows).collect()
        operations.append(sum(mode.operations.values()))
    assert operations[0] == operations[1]
