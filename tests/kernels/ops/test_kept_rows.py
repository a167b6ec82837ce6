"""Samplers that keep the rows of the step before: whatever rows follow, they are sampled as by a new sampler."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.sampling import NativeSampler
from aiakq.kernels.ops.sampling import SampleRow, TorchSampler

VOCAB = 200
ROWS = [
    SampleRow(),
    SampleRow(num_logprobs=0),
    SampleRow(num_logprobs=3),
    SampleRow(0.8),
    SampleRow(1.2, top_k=7, top_p=0.9, num_logprobs=5),
    SampleRow(0.7, min_p=0.05),
    SampleRow(0.9, top_p=0.8, all_candidates=True),
    SampleRow(token=11, num_logprobs=3),
]


def new_torch_sampler() -> TorchSampler:
    return TorchSampler(VOCAB)


@pytest.mark.parametrize("new_sampler", [new_torch_sampler, NativeSampler])
def test_rows_that_come_go_and_change_have_the_results_of_a_new_sampler(new_sampler):
    if new_sampler is NativeSampler and library.unavailable() is not None:
        pytest.skip("no native library")
    draw, kept = random.Random(5), new_sampler()
    rows: list[SampleRow] = []
    for step in range(60):
        # Most rows stay, as while sequences decode; then all are of one kind.
        rows = [one for one in rows if draw.random() < 0.9] + draw.choices(ROWS, k=draw.choice([0, 1, 1, 20]))
        if step % 20 == 19:
            rows = [draw.choice(ROWS)] * draw.choice([1, 3, 40])
        if draw.random() < 0.3:
            draw.shuffle(rows)
        rows = rows[-40:] or [ROWS[0]]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(step))
        uniforms = [draw.random() for _ in rows]
        pending, expected = kept(logits, rows, uniforms), new_sampler()(logits, rows, uniforms)
        assert pending.tokens.tolist() == expected.tokens.tolist()
        assert pending.collect() == expected.collect()
        assert set(pending.collect().top) == {at for at, row in enumerate(rows) if row.num_logprobs}


def test_parameters_stay_on_the_device_while_the_rows_are_the_same(monkeypatch):
    copied = []
    on_device = TorchSampler.__call__.__globals__["on_device"]
    monkeypatch.setitem(
        TorchSampler.__call__.__globals__, "on_device", lambda *given: copied.append(given) or on_device(*given)
    )
    sampler, logits = TorchSampler(VOCAB), torch.randn(len(ROWS), VOCAB)
    counts = []
    for _ in range(3):
        copied.clear()
        sampler(logits, ROWS, [0.5] * len(ROWS)).collect()
        counts.append(len(copied))
    assert counts[0] > 10 and counts[1:] == [1, 1], "only the random numbers are new"
