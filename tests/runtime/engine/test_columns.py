"""Columns of steady sequences: whatever a request asks for, its outputs are those of one object per sequence."""

from __future__ import annotations

import pytest
from mixed_requests import answers

from aiakq import LLM, SamplingParams
from aiakq.runtime.engine.sequence import ScheduledDecodes, SteadySequences


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


def test_what_is_the_same_in_every_step_is_gathered_once(tiny_model, monkeypatch):
    made: list[SteadySequences] = []
    inner = SteadySequences.__init__

    def counted(self, sequences):
        made.append(self)
        inner(self, sequences)

    monkeypatch.setattr(SteadySequences, "__init__", counted)
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64, max_num_seqs=4)
    llm.engine.scheduler.min_columns = 1
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (20, 20, 10)]
    prompts = [{"prompt_token_ids": [5 + at] * 6} for at in range(3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20, 10]
    assert [len(each.sequences) for each in made] == [3, 2], "again when one has ended"
    assert llm.engine.scheduler.steady is None, "no sequence stays in memory"
