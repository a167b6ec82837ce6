"""Columns of steady sequences: whatever a request asks for, its outputs are those of one object per sequence."""

from __future__ import annotations

import pytest
from mixed_requests import answers

from aiakq import LLM
from aiakq.runtime.engine.sequence import ScheduledDecodes


@pytest.mark.parametrize(
    "more", [{"async_scheduling": True}, {"async_scheduling": False, "num_gpu_blocks_override": 30}]
)
def test_requests_in_columns_have_the_outputs_of_objects(more, tiny_model, behind_bytes, monkeypatch):
    sizes: list[int] = []
    inner = ScheduledDecodes.__init__

    def counted(self, sequences, *previous):
        sizes.append(len(sequences))
        inner(self, sequences, *previous)

    monkeypatch.setattr(ScheduledDecodes, "__init__", counted)
    found = []
    for min_columns in (10**6, 1):
        given = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 12} | more
        llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", **given)
        llm.engine.scheduler.min_columns = min_columns
        found.append(answers(llm))
        assert bool(sizes) == (min_columns == 1)
    assert found[0] == found[1]
    assert max(sizes) > 2
    direct = answers(llm, functions=False)
    assert answers(behind_bytes(llm), functions=False) == direct, "columns can be encoded"
