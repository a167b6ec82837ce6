"""Records between engine and executor that are encoded: what crosses, and what cannot. See also test_exactness.py."""

from __future__ import annotations

import msgspec
import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.step import StepBatch


def test_a_decoding_step_is_a_few_bytes_per_sequence(tiny_model, behind_bytes):
    """What the executor knows is not sent again: not the prompt, not the page table, not the parameters."""
    llm = behind_bytes(LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=128))
    sizes = []
    inner = llm.engine.executor.crossed

    def crossed(record, type_):
        if type_ is StepBatch:
            sizes.append(len(msgspec.msgpack.encode(record)) / len(record.chunks))
        return inner(record, type_)

    llm.engine.executor.crossed = crossed
    prompts = [{"prompt_token_ids": [5 + n] * 60} for n in range(8)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert sizes[0] > 500
    assert max(sizes[1:]) < 90


def test_functions_are_refused_by_an_executor_that_encodes(tiny_model, behind_bytes):
    llm = behind_bytes(LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64))
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with pytest.raises(AiakqError, match="logits_processors") as caught:
        llm.generate(prompt, SamplingParams(logits_processors=[lambda outputs, logits: logits]), use_tqdm=False)
    assert caught.value.id == "unsupported_parameter"
    answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]
    assert len(answer.outputs[0].token_ids) == 3, "the next call works"


def test_logits_processors_are_forgotten_with_their_request(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64)
    seen = []

    def watch(outputs, logits):
        seen.append(len(outputs))
        return logits

    prompt = {"prompt_token_ids": [5, 6, 7]}
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logits_processors=[watch]), use_tqdm=False)
    assert seen == [0, 1, 2]
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert seen == [0, 1, 2] and not llm.engine.executor._processors
