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
