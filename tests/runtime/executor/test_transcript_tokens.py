"""The rules of transcripts are those of transformers' processors of logits."""

from __future__ import annotations

import pytest
import torch

from aiakq.runtime.executor.row_transforms import Outputs
from aiakq.runtime.executor.transcript_tokens import TranscriptTokens
from aiakq.runtime.protocol.transcripts import TranscriptRules

END, ZERO, VOCABULARY = 20, 30, 60
SEEN = [
    [],
    [ZERO],
    [ZERO, 3],
    [ZERO, 3, 4],
    [ZERO, 3, 40],
    [ZERO, 3, 40, 40],
    [ZERO, 3, 40, 40, 7],
    [ZERO + 5, 3, 4, 50, 51],
    [3, 4],
]


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("raised", [0.0, 4.0])
@pytest.mark.parametrize("most", [None, 8])
def test_timestamps_come_in_order(seen, raised, most):
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = ZERO - 1, most
    rules = TranscriptRules(END, [1, 2], [5], ZERO, most)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(seen)))
    logits[ZERO:] += raised
    prompt = [21, 22]
    expected, ids = logits[None], torch.tensor([prompt + seen])
    for process in (
        SuppressTokensAtBeginLogitsProcessor([5], begin_index=2, device="cpu"),
        SuppressTokensLogitsProcessor([1, 2], device="cpu"),
        WhisperTimeStampLogitsProcessor(config, begin_index=2),
    ):
        expected = process(ids, expected)
    TranscriptTokens(rules).apply(logits, Outputs(seen, 0))
    assert torch.equal(logits, expected[0])


def test_without_timestamps_only_tokens_are_suppressed():
    logits = torch.zeros(VOCABULARY)
    TranscriptTokens(TranscriptRules(END, [1], [2])).apply(logits, Outputs([4], 0))
    assert logits.isinf().nonzero().flatten().tolist() == [1]
