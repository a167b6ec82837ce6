"""Masks over the vocabulary in Triton, against torch."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops.sampling import CANDIDATES, SampleOutcome, SampleRow, TokenMasks, TorchSampler
from aiakq.kernels.triton.sampling import TritonSampler


@pytest.mark.parametrize("vocab", [31, 32, 1003, 4096])
def test_masks_are_those_of_torch(vocab, device):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab + 5, generator=generator)[:, :vocab].to(device)
    words = -(-vocab // 32) + 1  # a matcher may know a token more
    bits = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int().to(device)
    rows = torch.tensor([5, 0, 2], device=device)
    ours, theirs = logits.clone(), logits.clone()
    TritonSampler(CANDIDATES).mask(ours, rows, bits)
    TorchSampler(CANDIDATES).mask(theirs, rows, bits)
    assert torch.equal(ours, theirs)
    assert (ours == float("-inf")).any() and torch.equal(ours[1], logits[1])


def test_a_row_of_which_nothing_is_left(device):
    logits = torch.randn(2, 100, device=device)
    bits = torch.tensor([[0, 0, 0, 16]], dtype=torch.int32)  # token 100 is beyond the vocabulary
    rows = [SampleRow(), SampleRow(temperature=1.0)]
    before = logits.clone()
    results = TritonSampler(CANDIDATES)(logits, rows, [0.5, 0.5], None, TokenMasks([1], bits)).collect()
    assert results.failed == {1: SampleOutcome.NOTHING_LEFT}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [5, 4096, 5003])
def test_greedy_rows_are_those_of_torch(vocab, device):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab + 3, generator=generator)[:, :vocab].to(device)
    logits[1, vocab // 2 :] = logits[1].max()  # the first of equal ones
    logits[2] = float("-inf")
    logits[2, vocab - 1] = -3.0
    changed = logits.clone()
    changed[0, ::2] = float("-inf")
    for other in (logits, changed):
        ours = TritonSampler(CANDIDATES).greedy(logits, other, True)
        theirs = TorchSampler(CANDIDATES).greedy(logits, other, True)
        assert torch.equal(ours[0], theirs[0])
        assert all(
            torch.allclose(a, b.float(), rtol=1e-6, atol=2e-6) for a, b in zip(ours[1:], theirs[1:], strict=True)
        )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_greedy_rows_without_a_finite_sum_fail(number, device):
    logits = torch.zeros(2, 5003, device=device)
    logits[1] = number
    results = TritonSampler(CANDIDATES)(logits, [SampleRow(), SampleRow(num_logprobs=3)]).collect()
    assert results.failed == {1: SampleOutcome.NOT_FINITE}
    logits[1], logits[1, 5002] = 0.0, number
    assert set(TritonSampler(CANDIDATES)(logits, [SampleRow(), SampleRow()]).collect().failed) <= {1}


def test_log_probabilities_of_greedy_rows(device):
    logits = torch.randn(3, 5003, device=device)
    rows = [SampleRow(num_logprobs=2), SampleRow(), SampleRow(num_logprobs=0)]
    ours, theirs = (sampler(CANDIDATES)(logits, rows).collect() for sampler in (TritonSampler, TorchSampler))
    assert (ours.tokens, ours.ranks, ours.top[0].ids) == (theirs.tokens, theirs.ranks, theirs.top[0].ids)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
