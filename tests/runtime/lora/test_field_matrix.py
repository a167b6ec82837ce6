"""Every combination of an adapter's fields on every native family, against PEFT with transformers.

A share runs always; all of it with ``AIAKQ_EVERY_ARCHITECTURE=1 pytest tests/runtime/lora/test_field_matrix.py``.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import adapted, save_adapter
from torch import Tensor

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.models import ARCHITECTURES

#: Fused qkv and gate_up; latent attention and experts.
SHARE = ("Phi3ForCausalLM", "DeepseekV3ForCausalLM")
VOCABULARY = 320
LENGTHS = (1, 9, 33)
NUM_TOKENS = 4
#: Nats; float32 sums in another order.
TOLERANCE = 3e-4
TOLERANCES = dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), 6e-4)
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "cpu_math": "exact",
    "num_gpu_blocks_override": 600,
    "max_num_seqs": 64,
    "max_logprobs": -1,
    "enable_prefix_caching": False,
    "enable_lora": True,
    "max_loras": 16,
}
#: Linear layers that an adapter cannot change: factors of keys and values that are multiplied into other products, and
#: routers of experts.
REFUSED = ("kv_b_proj", "router")

Fields = dict[str, Any]


def of_transformers(folder: Path) -> Any:
    """Load the model with its type hidden, because PEFT adapts all experts at once for known types with experts and
    refuses some layers of recurrent ones.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.config.model_type = "of no known type"
    return model


def linear_layers(model: Any) -> list[str]:
    """Names of linear layers, without the output layer and those that adapters cannot change."""
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    return [name for name in linear if name != "lm_head" and not name.endswith(REFUSED)]


def last_words(names: list[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def layer_pattern(names: list[str]) -> str:
    """What stands before the numbers of layers: layers, h or blocks."""
    (word,) = {name.split(".")[at - 1] for name in names for at in [layer_position(name)]}
    return word


def layer_position(name: str) -> int:
    return next(index for index, word in enumerate(name.split(".")) if word.isdigit())


def combinations(names: list[str]) -> dict[str, Fields]:
    """Combinations of fields for a model with these linear layers; 16 adapters."""
    words, draw = last_words(names), random.Random(5)
    first, last = words[0], words[-1]
    layered = {"target_modules": words, "layers_to_transform": [1], "layers_pattern": layer_pattern(names)}
    patterns = {
        "rank_pattern": {first: 6, names[-1]: 1},
        "alpha_pattern": {"^" + names[0]: 9, last: 0.5, rf"(.*\.)?1\..*{first}": 3},
    }
    found: dict[str, Fields] = {
        "plain": {"r": 4, "lora_alpha": 16},
        "default rank": {},
        "patterns": {"r": 3, "lora_alpha": 5, **patterns},
        "root of the rank": {"r": 5, "lora_alpha": 7, "use_rslora": True},
        "patterns and root": {"r": 2, "lora_alpha": 3, "use_rslora": True, **patterns},
        "bias of B": {"r": 4, "lora_alpha": 6, "lora_bias": True, **patterns},
        "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
        "DoRA, patterns and root": {"r": 3, "lora_alpha": 4, "use_dora": True, "use_rslora": True, **patterns},
        "subset": {"r": 4, "target_modules": names[::2]},
        "one layer": {"r": 4, "lora_alpha": 12, **layered},
        "excluded": {"r": 4, "lora_alpha": 12, "target_modules": words, "exclude_modules": [words[len(words) // 2]]},
        "a regex": {"r": 3, "target_modules": rf".*\.({first}|{last})", "exclude_modules": r".*\.0\..*"},
        "output layer": {"r": 4, "target_modules": [names[0], "lm_head"]},
        "output layer with DoRA": {"r": 4, "use_dora": True, "target_modules": [names[-1], "lm_head"], **patterns},
    }
    for number in range(2):
        chosen = draw.sample(names, draw.randint(1, len(names)))
        found[f"random {number}"] = {
            "r": draw.randint(1, 16),
            "lora_alpha": draw.uniform(1, 20),
            "use_rslora": draw.random() < 0.5,
            ("use_dora" if number else "lora_bias"): True,
            "target_modules": chosen,
            "rank_pattern": {name: draw.randint(1, 16) for name in draw.sample(chosen, (len(chosen) + 1) // 2)},
            "alpha_pattern": {name: draw.uniform(0.1, 20) for name in draw.sample(chosen, (len(chosen) + 1) // 2)},
        }
    return {name: {"target_modules": names, **fields} for name, fields in found.items()}


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities [T, V] of every prompt, and greedy tokens after the longest one."""

    scores: list[Tensor]
    tokens: list[int]


def answer_of_peft(model: Any) -> Answer:
    with torch.inference_mode():
        scores = [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]
        ids = prompts()[-1]
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return Answer(scores, ids[-NUM_TOKENS:])


def answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[Answer]:
    """What the rows of each adapter get in one batch of all prompts of all adapters."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY, ignore_eos=True
    )
    rows = [(adapter, prompt) for adapter in adapters for prompt in prompts()]
    order = random.Random(len(rows)).sample(range(len(rows)), len(rows))
    given = [{"prompt_token_ids": rows[index][1]} for index in order]
    results = llm.generate(given, params, False, lora_request=[rows[index][0] for index in order])
    by_row = dict(zip(order, results, strict=True))
    found = []
    for start in range(0, len(rows), len(LENGTHS)):
        own = [by_row[start + index] for index in range(len(LENGTHS))]
        scores = []
        for result in own:
            positions = [*result.prompt_logprobs[1:], result.outputs[0].logprobs[0]]
            scores.append(torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in positions]))
        found.append(Answer(scores, list(own[-1].outputs[0].token_ids)))
    return found


def last_scores(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[float]]:
    """Log-probabilities of the token after the longest prompt, of one row for each adapter."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCABULARY)
    results = llm.generate([{"prompt_token_ids": prompts()[-1]}] * len(adapters), params, False, lora_request=adapters)
    return [[result.outputs[0].logprobs[0][token].logprob for token in range(VOCABULARY)] for result in results]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def same_bits(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and all(map(torch.equal, one.scores, other.scores))


Made = dict[LoRARequest | None, Answer]


def make_adapters(folder: Path, path: Path) -> Made:
    """An adapter of every combination, none, and what PEFT answers."""
    base = of_transformers(folder)
    made: Made = {None: answer_of_peft(base)}
    for number, (name, fields) in enumerate(combinations(linear_layers(base)).items()):
        model = adapted(copy.deepcopy(base), seed=number, **fields)
        model.save_pretrained(str(path / str(number)), save_embedding_layers=False)
        request = LoRARequest(name, number + 1, str(path / str(number)))
        made[request] = answer_of_peft(model)
        assert difference(made[request].scores, made[None].scores) > 0.01, f"{name} changes nothing"
    return made


FAMILIES = list(ARCHITECTURES) if os.environ.get("AIAKQ_EVERY_ARCHITECTURE") else SHARE


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_combination_gives_what_peft_gives(architecture, tiny_model, tmp_path):
    folder = tiny_model(architecture)
    made = make_adapters(folder, tmp_path)
    requests, llm = list(made), LLM(str(folder), **ARGUMENTS)
    mixed = dict(zip(requests, answers(llm, requests), strict=True))
    tolerance = TOLERANCES.get(architecture, TOLERANCE)
    wrong = {
        request.lora_name if request else "base": difference(mixed[request].scores, made[request].scores)
        for request in requests
    }
    assert max(wrong.values()) < tolerance, wrong
    assert {name: mixed[name].tokens for name in requests} == {name: made[name].tokens for name in requests}
    # Alone, in batches of 1 to 16 adapters beside a base row, and in chunks, to the bit.
    for request in requests:
        assert same_bits(answers(llm, [request])[0], mixed[request]), f"{request} in a batch is not as alone"
    last = [mixed[request].scores[-1][-1].tolist() for request in requests]
    for count in range(1, len(requests)):
        chosen = random.Random(count).sample(range(1, len(requests)), count)
        found = last_scores(llm, [requests[index] for index in (0, *chosen)])
        assert found == [last[index] for index in (0, *chosen)], f"a batch of {count} adapters"
    chunked = LLM(str(folder), **{**ARGUMENTS, "max_num_batched_tokens": 16, "max_num_seqs": 8, "max_loras": 3})
    for request, found in zip(requests, answers(chunked, requests), strict=True):
        assert same_bits(found, mixed[request]), f"{request} in chunks"
    plain = LLM(str(folder), **{**ARGUMENTS, "enable_lora": False})
    assert same_bits(answers(plain, [None])[0], mixed[None]), "rows without an adapter have other bits"


def refusal(llm: LLM, model: Any, path: Path, change: Callable[[Any], None] = lambda model: None) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        request = LoRARequest(str(path), 1, str(save_adapter(model, path)))
        llm.generate({"prompt_token_ids": [5]}, use_tqdm=False, lora_request=request)
    return caught.value


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_not_supported_is_refused_by_name(architecture, tiny_model, tmp_path):
    """Embeddings, layers that cannot be adapted, experts, and biases and whole layers of the base."""
    folder = tiny_model(architecture)
    base = of_transformers(folder)
    llm = LLM(str(folder), **ARGUMENTS)
    names = linear_layers(base)
    assert set(names) | {"lm_head"} == set(llm.engine.limits.adapters.modules), "a layer is not tested"
    embedding = next(name for name, module in base.named_modules() if isinstance(module, torch.nn.Embedding))
    problem = refusal(llm, adapted(copy.deepcopy(base), target_modules=[embedding, names[0]]), tmp_path / "embedding")
    assert problem.id == "adapter_unsupported" and embedding in str(problem)
    whole = adapted(copy.deepcopy(base), target_modules=names, modules_to_save=["lm_head"])
    problem = refusal(llm, whole, tmp_path / "whole")
    assert problem.id == "adapter_unsupported" and "modules_to_save" in str(problem)
    if any(name.endswith("bias") for name, _ in base.named_parameters()):
        problem = refusal(llm, adapted(copy.deepcopy(base), target_modules=names, bias="all"), tmp_path / "bias")
        assert problem.id == "adapter_unsupported" and "bias = 'all'" in str(problem)
    linear = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    for name in [name for name in linear if name.endswith(REFUSED)][:1]:
        problem = refusal(llm, adapted(copy.deepcopy(base), target_modules=[name, names[0]]), tmp_path / "layer")
        assert problem.id == "adapter_mismatch" and name in str(problem)
    experts = [name for name, parameter in base.named_parameters() if parameter.dim() == 3 and "experts" in name]
    if experts:
        fields = {"target_modules": names, "target_parameters": experts[:1]}
        problem = refusal(llm, adapted(copy.deepcopy(base), **fields), tmp_path / "experts")
        assert problem.id == "adapter_unsupported" and "target_parameters" in str(problem)
