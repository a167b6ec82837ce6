"""The engine's path for GPUs, on a fake one: the same tokens with graphs and without, and no wait that is not meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda.device import FakeDevice
from fake_cuda.install import counted, fake_cuda
from replay_proposer import planner_of

from aiakq import LLM, SamplingParams
from aiakq.runtime.speculation.draft_length import StepCosts

#: Models of two layers, as small as they can be: Triton's interpreter takes 10 ms for a program of most kernels.
SMALL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "Qwen3MoeForCausalLM": {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4},
    "Mamba2ForCausalLM": {},
}
PROMPTS = [{"prompt_token_ids": [5, 9, 4]}, {"prompt_token_ids": [40, 41]}]
PARAMS = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True) for _ in PROMPTS]
EAGER: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False}
CAPTURED: dict[str, Any] = {"async_scheduling": False}
ASYNCHRONOUS: dict[str, Any] = {"async_scheduling": True}


def loaded(folder, **arguments) -> LLM:
    return LLM(str(folder), dtype="bfloat16", device="cuda", max_model_len=32, max_num_seqs=2, **arguments)


def tokens(llm: LLM, params=PARAMS) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("architecture", "modes"),
    [
        ("LlamaForCausalLM", (EAGER, CAPTURED, ASYNCHRONOUS)),
        ("Qwen3MoeForCausalLM", (EAGER, ASYNCHRONOUS)),
        ("Mamba2ForCausalLM", (EAGER, ASYNCHRONOUS)),
    ],
    ids=SMALL,
)
def test_graphs_and_asynchronous_steps_change_no_token(architecture, modes, tiny_model):
    folder = tiny_model(architecture, **SMALL[architecture])
    found = []
    for arguments in modes:
        with fake_cuda() as device:
            llm = loaded(folder, **arguments)
            with counted(device) as launches:
                found.append(tokens(llm))
            is_captured = llm.engine.facts["step"].startswith("decoding in CUDA graphs")
            assert is_captured == (arguments is not EAGER and architecture != "Mamba2ForCausalLM")
            assert bool(launches.replays) == is_captured
            # Only a capture waits for the GPU itself, and nobody reads what it has not sent.
            assert launches.blocked == []
            assert launches.waits["torch.cuda.synchronize"] == is_captured
            assert launches.waits["Event.synchronize"] == launches.to_host == 4
    assert all(each == found[0] for each in found)
