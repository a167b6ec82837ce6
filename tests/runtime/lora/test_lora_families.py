"""LoRA adapters on every native family, against PEFT with transformers: log-probabilities of every position."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import FIELDS, adapted, save_adapter
from torch import Tensor

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.runtime.lora.layers import find_module
from aiakq.runtime.models import ARCHITECTURES

VOCABULARY = 320
LENGTHS = (1, 2, 3, 7, 16, 17, 50, 60)
#: Nats; float32 sums in another order.
TOLERANCE = 2e-4
TOLERANCES = dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), 6e-4)
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 128,
    "cpu_math": "exact",
    "num_gpu_blocks_override": 257,
    "max_logprobs": -1,
    "enable_lora": True,
    "max_loras": 4,
}


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def scores(llm: LLM, adapters: list[LoRARequest | None]) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY)
    given = [{"prompt_token_ids": each} for each in prompts()]
    answers = llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in each]) for each in rows]


def scores_of_peft(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]


def of_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def adaptable(llm: LLM, model: Any) -> list[str]:
    """Linear layers of both models, without the output layer, that PEFT adapts."""
    from transformers.pytorch_utils import Conv1D

    limits = llm.engine.limits.adapters
    assert limits is not None
    linear = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    refused: tuple[str, ...] = ("lm_head",)
    if model.config.model_type in {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}:
        refused = ("lm_head", "out_proj")
    elif any("experts" in name for name, _ in model.named_parameters()):
        refused = ("lm_head", "gate_proj", "up_proj", "down_proj")  # for which PEFT adapts all experts
    return [name for name in linear if find_module(name, limits.modules) and not name.endswith(refused)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_of_a_batch_give_what_peft_gives(architecture, tiny_model, tmp_path):
    folder = tiny_model(architecture)
    llm = LLM(str(folder), **ARGUMENTS)
    names = adaptable(llm, of_transformers(folder))
    assert len(names) >= 2, "the family has no linear layers of known names"
    expected, requests = {None: scores_of_peft(of_transformers(folder))}, [None]
    for number, fields in enumerate(({"r": 4}, {"r": 3, "use_dora": True}, {"r": 9, "use_rslora": True})):
        targets = names if number < 2 else names[::2]
        model = adapted(of_transformers(folder), seed=number, target_modules=targets, **fields)
        request = LoRARequest(f"adapter {number}", number + 1, str(save_adapter(model, tmp_path / str(number))))
        expected[request] = scores_of_peft(model)
        requests.append(request)
        assert min(difference(*pair) for pair in zip(expected[request], expected[None], strict=True)) > 0.01
    chosen = [requests[index % len(requests)] for index in range(len(LENGTHS))]
    found = scores(llm, chosen)
    tolerance = TOLERANCES.get(architecture, TOLERANCE)
    for index, request in enumerate(chosen):
        assert difference(found[index], expected[request][index]) < tolerance, (index, request)
    plain = LLM(str(folder), **{**ARGUMENTS, "enable_lora": False})
    for index, (mixed, alone) in enumerate(zip(found, scores(plain, [None] * len(LENGTHS)), strict=True)):
        if chosen[index] is None:
            assert torch.equal(mixed, alone), "rows without an adapter have other bits"


@pytest.mark.parametrize("name", FIELDS)
def test_every_combination_of_fields_gives_what_peft_gives(name, tiny_model, tmp_path):
    folder = tiny_model("LlamaForCausalLM")
    model = adapted(of_transformers(folder), seed=5, **FIELDS[name])
    request = LoRARequest(name, 1, str(save_adapter(model, tmp_path / "adapter")))
    expected = scores_of_peft(model)
    for arguments in ({}, {"enforce_eager": True, "max_num_batched_tokens": 16, "max_num_seqs": 2}):
        found = scores(LLM(str(folder), **{**ARGUMENTS, **arguments}), [request] * len(LENGTHS))
        assert max(difference(*pair) for pair in zip(found, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"], ids=["own head", "tied head"])
def test_the_output_layer_may_be_adapted(architecture, tiny_model, tmp_path):
    folder = tiny_model(architecture)
    model = adapted(of_transformers(folder), r=4, target_modules=["lm_head", "v_proj"])
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    expected = scores_of_peft(model)
    found = scores(LLM(str(folder), **ARGUMENTS), [LoRARequest("head", 1, str(tmp_path))] * len(LENGTHS))
    assert max(difference(*pair) for pair in zip(found, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize(
    ("stored", "of_class"),
    [
        ("self_attn.f_a_proj", "self_attn.forget_gate.f_a_proj"),  # Kimi Linear
        ("block_sparse_moe.shared_experts.up_proj", "mlp.shared_experts.up_proj"),
        ("self_attn.gate_proj", "self_attn.g_proj"),  # LFM3
    ],
)
def test_modules_have_the_names_of_files_or_of_the_classes_of_transformers(stored, of_class):
    names = [f"model.layers.1.{name}" for name in (stored, of_class)]
    for own, other in (names, names[::-1]):
        assert find_module(own, {own: 0, other: 0}) == own
        assert find_module(other, [own]) == own
        assert find_module(other.replace(".1.", ".2."), [own]) is None
