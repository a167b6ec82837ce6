"""EAGLE-3 heads: the logits of a plain reference, in published layouts, and answers that do not change."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import CONFIG, ReferenceHead, write_head
from mixed_requests import answers, requests
from replay_proposer import planner_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.protocol.command import EnableDrafts
from aiakq.runtime.protocol.step import SampledToken
from aiakq.runtime.speculation import step_costs
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.eagle3.head import Eagle3Head
from aiakq.runtime.speculation.head_proposer import Part

PROMPT = [7, 300, 21, 5, 90, 41, 7, 300, 8, 111, 4, 77, 250]
#: The head of speculators' layout.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "model_type": None,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
    "transformer_layer_config": {
        name: CONFIG[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    }
    | {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 512},
}
MODES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 34, "block_size": 4},
    "prefix": {"enable_prefix_caching": True, "block_size": 4},
    "eager": {"enforce_eager": True},
    "ahead": {"async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2},
}
#: Draft tokens that take no time, so that there are as many as possible.
FREE = StepCosts({1: 1.0, 1000: 1.0})
DRAFTING = {"num_speculative_tokens": 4, "disable_by_batch_size": 1000}


@pytest.fixture(autouse=True)
def free(monkeypatch) -> None:
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)


@pytest.fixture(scope="module")
def target(tiny_model) -> str:
    return str(tiny_model("LlamaForCausalLM", num_hidden_layers=8))


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("head")
    write_head(folder)
    return str(folder)


def drafting(target: str, head: object, **arguments: Any) -> LLM:
    config = {"model": str(head), **DRAFTING}
    llm = LLM(target, dtype="float32", max_model_len=128, speculative_config=config, **arguments)
    planner_of(llm).max_rows = 100
    return llm


def recorded_logits(monkeypatch) -> list[torch.Tensor]:
    """The logits that heads compute from now on."""
    found: list[torch.Tensor] = []
    inner = Eagle3Head.whole_vocabulary

    def record(self: Eagle3Head, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        found.extend(logits.float().clone())
        return inner(self, logits, vocab_size)

    monkeypatch.setattr(Eagle3Head, "whole_vocabulary", record)
    return found


def aux_of(target: str, tokens: list[int], layers: list[int]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return [states[layer][0] for layer in layers]


@pytest.mark.parametrize("mode", ["plain", "chunked", "eager"])
@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [2, 4, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}}, [1, 4, 7]),
        ({**SPECULATORS, "layer": "layers.0"}, [1, 2, 5]),
        ({**SPECULATORS, "layer": "layers.0", "norm_before_fc": True}, [1, 2, 5]),
        ({"fc_norm": True, "norm_output": True}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 7, 8], "fc_norm": True}, [1, 2, 4, 7, 8]),
    ],
    ids=["authors", "SpecForge", "speculators", "norm before fc", "EAGLE-3.1", "five layers"],
)
def test_logits_are_those_of_the_reference(changes, layers, mode, target, tmp_path, monkeypatch):
    tensors = write_head(tmp_path, **changes)
    layer = changes.get("layer", "midlayer")
    settings = (changes.get(name, False) for name in ("norm_before_residual", "norm_output"))
    reference = ReferenceHead(tensors, layer, *settings)
    logits = recorded_logits(monkeypatch)
    llm = drafting(target, tmp_path, **MODES[mode])
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids
    known = [*PROMPT, tokens[0]]
    with torch.inference_mode():
        _, rows = reference.chain(aux_of(target, PROMPT, layers), known, 4)
    assert torch.allclose(torch.stack(logits[:4]), torch.stack(rows), rtol=1e-4, atol=1e-4)
    # The first row behind a verification reads the target's hidden states again.
    whole = [*PROMPT, *tokens]
    with torch.inference_mode():
        aux = aux_of(target, whole, layers)
        own, _ = reference.step(reference.fuse(aux)[:-1], torch.tensor(whole[1:]))
    assert sum((own - row).abs().amax(1).min() < 1e-3 for row in logits[4:]) >= 2


@pytest.fixture(scope="module")
def expected(target) -> list:
    return answers(LLM(target, dtype="float32", max_model_len=128))


@pytest.fixture
def knows_answers(monkeypatch) -> Callable[[list], None]:
    """``knows_answers(expected)`` makes heads propose the tokens of these answers, with mistakes at random places."""

    def know(expected: list) -> None:
        draw = random.Random(3)
        known = [
            prompt["prompt_token_ids"] + list(output.token_ids)
            for prompt, (outputs, _, _) in zip(requests(320)[0], expected, strict=True)
            for output in outputs
        ]
        inner = Part.append

        def append(part: Part, sampled: SampledToken) -> None:
            before = [*part.sequence.token_ids, *part.tokens]
            same = [one for one in known if one[: len(before)] == before and len(one) > len(before)]
            if same and sampled.is_valid and draw.random() > 0.2:
                sampled = SampledToken(draw.choice(same)[len(before)], 0.0)
            inner(part, sampled)

        monkeypatch.setattr(Part, "append", append)

    return know


@pytest.mark.parametrize("mode", MODES)
def test_a_head_changes_no_answer(target, head, expected, mode, knows_answers):
    functions = mode != "ranks"
    plain = expected if functions else answers(LLM(target, dtype="float32", max_model_len=128), functions=False)
    knows_answers(plain)
    llm = drafting(target, head, **MODES[mode])
    assert answers(llm, functions) == plain
    drafts = llm.engine.stats.drafts
    assert drafts.drafts > drafts.accepted > 20
    if mode == "preempted":
        assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM"]
)
def test_native_families_can_have_a_head(architecture, tiny_model, tmp_path, knows_answers):
    folder = str(tiny_model(architecture))
    write_head(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    plain = answers(LLM(folder, dtype="float32", max_model_len=128))
    knows_answers(plain)
    llm = drafting(folder, tmp_path)
    assert answers(llm) == plain
    assert llm.engine.stats.drafts.accepted > 20


def test_a_head_follows_sequences_that_get_no_draft_tokens(target, head, monkeypatch):
    """While many sequences run it reads their hidden states all the same, and proposes as if it always had."""
    prompts = [{"prompt_token_ids": [3 + at, 4, 5]} for at in range(4)]
    many = [SamplingParams(temperature=0, max_tokens=60 if at == 0 else 12, ignore_eos=True) for at in range(4)]
    logits = recorded_logits(monkeypatch)
    llm = LLM(
        target, dtype="float32", max_model_len=128, speculative_config={"model": head, "disable_by_batch_size": 3}
    )
    found = llm.generate(prompts, many, use_tqdm=False)[0].outputs[0].token_ids
    plain = LLM(target, dtype="float32", max_model_len=128)
    assert found == plain.generate(prompts, many, use_tqdm=False)[0].outputs[0].token_ids
    reference = ReferenceHead(load_file(f"{head}/model.safetensors"))
    whole = [*prompts[0]["prompt_token_ids"], *found]
    with torch.inference_mode():
        own, _ = reference.step(reference.fuse(aux_of(target, whole, [2, 4, 5]))[:-1], torch.tensor(whole[1:]))
    late = own[20:]  # while the others run, there are no draft tokens
    assert sum((late - row).abs().amax(1).min() < 1e-3 for row in logits) >= 2


def test_a_value_of_its_config_that_cannot_be_computed_with_is_refused(target, tmp_path):
    write_head(tmp_path, partial_rotary_factor=float("nan"))
    with pytest.raises(AiakqError, match="config.json cannot be read: partial_rotary_factor is nan"):
        drafting(target, tmp_path)


def test_a_head_may_share_the_embedding_of_its_model(target, tmp_path, monkeypatch):
    """Also over ranks, each of which has a part of it."""
    tensors = write_head(tmp_path, embedding=False)
    tensors["embed_tokens.weight"] = load_file(f"{target}/model.safetensors")["model.embed_tokens.weight"]
    with torch.inference_mode():
        params = SamplingParams(temperature=0, max_tokens=8)
        plain = LLM(target, dtype="float32").generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        tokens = plain[0].outputs[0].token_ids
        _, rows = ReferenceHead(tensors).chain(aux_of(target, PROMPT, [2, 4, 5]), [*PROMPT, tokens[0]], 4)
    for ranks in (1, 2):
        with monkeypatch.context() as patch:
            logits = recorded_logits(patch)
            llm = drafting(target, tmp_path, tensor_parallel_size=ranks)
            assert llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids == tokens
            assert torch.allclose(torch.stack(logits[:4]), torch.stack(rows), rtol=1e-4, atol=1e-4)


def test_draft_tokens_are_tokens_of_the_target(target, head):
    """The method is found in the head's config, and d2t maps its tokens to the target model's."""
    llm = LLM(target, dtype="float32", max_model_len=128, speculative_model=head, num_speculative_tokens=3)
    assert llm.engine.scheduler.config.speculation.method == "eagle3"
    assert "eagle3" in llm.engine.facts["drafts"] and "operations in one call" in llm.engine.facts["drafts"]
    proposed = []
    inner = llm.engine.executor.proposer.propose

    def propose(chunks, sequences, results, running, observed):
        inner(chunks, sequences, results, running, observed)
        proposed.extend(token for result in results for token in result.proposed)

    llm.engine.executor.proposer.propose = propose
    llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=20, seed=3, ignore_eos=True), use_tqdm=False)
    tensors = load_file(f"{head}/model.safetensors")
    assert len(proposed) > 4 and all(tensors["t2d"][token] for token in proposed)


@pytest.mark.parametrize("method", ["weight_only_int8", "awq"])
def test_a_quantized_target_can_have_a_head(method, target, head, tmp_path, knows_answers):
    folder = tmp_path / "quantized"
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
    quantize_checkpoint(QuantizeOptions(target, str(folder), method, token_ids=ids, seqlen=32, evaluate=False))
    plain = answers(LLM(str(folder), dtype="float32", max_model_len=128, cpu_math="exact"))
    knows_answers(plain)
    llm = drafting(str(folder), head, cpu_math="exact")
    assert answers(llm) == plain
    assert llm.engine.stats.drafts.accepted > 20


def changed(head: str, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of ``head`` with other tensors."""
    kept = load_file(f"{head}/model.safetensors")
    for name, tensor in tensors.items():
        kept.pop(name)
        kept |= {} if tensor is None else {name: tensor}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"fc.weight": None}, "fc.weight"),
        ({"norm.weight": torch.ones(64)}, "norm.weight"),
        ({"d2t": None}, "d2t"),
        ({"d2t": torch.full((256,), 100)}, "d2t"),
        ({"d2t": torch.full((256,), torch.nan)}, "d2t"),
    ],
    ids=["no fc", "another width", "no d2t", "a token that is not there", "no integers"],
)
def test_a_head_with_other_tensors_is_refused(tensors, named, target, head, tmp_path):
    with pytest.raises(AiakqError) as caught:
        drafting(target, changed(head, tmp_path, **tensors))
    assert caught.value.id in ("tensor_inventory", "tensor_mismatch")
    assert named in str(caught.value) + str(caught.value.fields)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "midlayer.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_head_with_values_that_are_not_finite_is_refused_by_name(value, name, target, head, tmp_path):
    tensors = load_file(f"{head}/model.safetensors")
    broken = tensors[name].clone()
    broken.view(-1)[3] = value
    with pytest.raises(AiakqError, match=re.escape(name)) as caught:
        drafting(target, changed(head, tmp_path, **{name: broken}))
    assert caught.value.id == "not_finite"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mask_hidden", "parallel drafting"),
        ("layers.1.input_layernorm.weight", "several layers"),
        ("midlayer.self_attn.q_proj.weight_packed", "quantized"),
    ],
)
def test_a_head_with_tensors_of_another_kind_is_refused_by_name(name, named, target, head, tmp_path):
    folder = changed(head, tmp_path)
    save_file({**load_file(folder / "model.safetensors"), name: torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(AiakqError, match=named) as caught:
        drafting(target, folder)
    assert caught.value.id == "unsupported"


@pytest.mark.parametrize("name", ["input_norm.weight", "fc_norm.0.weight"])
def test_norms_that_the_config_does_not_name_are_refused(name, target, head, tmp_path):
    folder = changed(head, tmp_path)
    save_file({**load_file(folder / "model.safetensors"), name: torch.ones(384)}, folder / "model.safetensors")
    with pytest.raises(AiakqError) as caught:
        drafting(target, folder)
    assert caught.value.id == "tensor_inventory" and name in caught.value.fields["table"]


def test_heads_whose_config_looks_like_a_models_are_known_by_their_tensors(target, head, tmp_path):
    """The authors publish EAGLE-1 and EAGLE-2 heads with the config.json of a Llama model of one layer."""
    like_a_model = {name: value for name, value in CONFIG.items() if name != "draft_vocab_size"}
    like_a_model["architectures"] = ["LlamaForCausalLM"]
    kept = load_file(f"{head}/model.safetensors")
    eagle1 = {
        name.replace("midlayer", "layers.0"): tensor
        for name, tensor in kept.items()
        if not any(part in name for part in ("hidden_norm", "lm_head", "2t", "2d")) and name != "norm.weight"
    }
    eagle1["fc.weight"] = torch.ones(128, 256)
    for name, tensors in (("eagle1", eagle1), ("eagle3", kept)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(like_a_model))
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    for name, said in (("eagle1", "EAGLE-1 and EAGLE-2"), ("eagle3", "An EAGLE-3 head as a draft model")):
        with pytest.raises(AiakqError, match=said) as caught:
            drafting(target, tmp_path / name)
        assert caught.value.id == "unsupported"


def test_the_method_eagle3_takes_a_head_without_draft_vocab_size(target, tmp_path):
    """It then proposes every token."""
    write_head(tmp_path, draft_vocab_size=320)
    config = {name: value for name, value in CONFIG.items() if name != "draft_vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    llm = LLM(target, dtype="float32", speculative_config={"method": "eagle3", "model": str(tmp_path)})
    assert llm.engine.scheduler.config.speculation.method == "eagle3"


def test_the_method_eagle3_refuses_a_model(target):
    with pytest.raises(AiakqError, match="not an EAGLE-3 head"):
        LLM(target, dtype="float32", speculative_config={"method": "eagle3", "model": target})


def test_models_that_run_through_transformers_cannot_have_a_head(target, head):
    with pytest.raises(AiakqError, match="through transformers"):
        drafting(target, head, model_impl="transformers")


def test_a_model_whose_tokens_have_several_hidden_states_cannot_have_a_head(head, tiny_model):
    layers = {"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 8, "num_kv_shared_layers": 0}
    layers |= {"intermediate_size": 64, "activation_sparsity_pattern": None}
    with pytest.raises(AiakqError, match="whose tokens have several hidden states"):
        drafting(str(tiny_model("Gemma3nForCausalLM", **layers)), head)


def test_a_head_can_be_switched_off_and_on_between_steps(target, head, expected, knows_answers):
    knows_answers(expected)
    llm = drafting(target, head)
    inner, numbers = llm.engine.step, itertools.count()

    def step(now, inbox):
        number = next(numbers)
        return inner(now, [*inbox, EnableDrafts(number % 20 < 15)] if number % 5 == 0 else inbox)

    llm.engine.step = step
    assert answers(llm) == expected
    assert llm.engine.stats.drafts.accepted > 0
