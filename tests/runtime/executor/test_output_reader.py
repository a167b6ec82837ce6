"""OutputReader: what is read from the model's output for a sequence, besides its tokens."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops import Ops
from aiakq.runtime.executor.output_reader import ModelOutput, PromptLogprobsReader, prompt_logprobs, sampled_positions
from aiakq.runtime.protocol.step import Chunk, ChunkResult

VOCAB = 12
CPU_SAMPLER = Ops(torch.device("cpu"), torch.float32).sampler()


def test_prompt_logprobs_put_the_actual_token_first():
    logits = torch.randn(2, VOCAB)
    rows = prompt_logprobs(CPU_SAMPLER, logits, [5, 6], 2)()
    raw = logits.log_softmax(-1)
    assert [row.token_ids[0] for row in rows] == [5, 6]
    assert rows[0].logprobs[0] == pytest.approx(raw[0, 5].item(), abs=1e-6)
    assert rows[0].token_ids[1:] == raw[0].topk(2).indices.tolist()
    assert rows[1].chosen_rank == int((raw[1] > raw[1, 6]).sum()) + 1


def test_log_probabilities_need_every_position_of_the_prompt_and_then_what_is_sampled():
    reader, logits = PromptLogprobsReader([3, 1, 2], -1), torch.randn(3, VOCAB)
    whole, decoded = Chunk(0, 0, 3, [], True), Chunk(0, 3, 3, [], True, drafts=[7, 8])
    assert list(reader.positions(whole)) == [0, 1, 2] and list(sampled_positions(whole)) == [2]
    assert list(reader.positions(decoded)) == list(sampled_positions(decoded)) == [3, 4, 5]
    assert reader.read(decoded, ModelOutput(logits, CPU_SAMPLER), range(3)) is None
    for chunk, rows, expected in ((whole, range(3), [1, 2]), (Chunk(0, 2, 1, [], True), range(1), [])):
        fill, result = reader.read(chunk, ModelOutput(logits, CPU_SAMPLER), rows), ChunkResult()
        assert fill is not None
        fill(result)
        assert result.prompt_logprobs is not None
        assert [each.token_ids[0] for each in result.prompt_logprobs] == expected


def test_readers_share_one_copy_that_the_next_step_does_not_change():
    rows = torch.randn(2, 4)
    output, expected = ModelOutput(rows, CPU_SAMPLER), rows.clone()
    one, two = output.on_host(), output.on_host()
    rows.zero_()
    assert torch.equal(one(), expected) and one() is two()
