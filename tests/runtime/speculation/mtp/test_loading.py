"""Layers for multi-token prediction: the logits of transformers' own layer, and answers that do not change."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_requests import answers, requests
from mtp_layers import write_files, write_model
from replay_proposer import planner_of
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.model_folder import MANIFEST
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.protocol.step import SampledToken
from aiakq.runtime.speculation import step_costs
from aiakq.runtime.speculation.draft_head import DraftHead
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.head_proposer import Part

PROMPT = [7, 300, 21, 5, 90, 41, 7, 300, 8, 111, 4, 77, 250]
#: The tiny models with a layer more, which becomes the one for multi-token prediction.
LONGER: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 3},
    "Glm4MoeForCausalLM": {"num_hidden_layers": 4},
    "MiMoForCausalLM": {"num_hidden_layers": 3},
    "Glm4MoeLiteForCausalLM": {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    **{
        f"Qwen3{name}ForCausalLM": {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        }
        for name in ("Next", "_5", "_5Moe")
    },
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 34, "block_size": 4},
    "prefix": {"enable_prefix_caching": True, "block_size": 4},
    "ahead": {"async_scheduling": True},
    "adapters": {"enable_lora": True},
    "ranks": {"tensor_parallel_size": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def free(monkeypatch) -> None:
    """Draft tokens take no time, so that there are as many as possible."""
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: StepCosts({1: 1.0, 1000: 1.0}))


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    write_model(tiny_model("Glm4MoeForCausalLM", **LONGER["Glm4MoeForCausalLM"]), folder)
    return str(folder)


@pytest.fixture(scope="module")
def recurrent(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recurrent")
    write_model(tiny_model("Qwen3_5ForCausalLM", **LONGER["Qwen3_5ForCausalLM"]), folder)
    return str(folder)


def drafting(folder: object, method: str = "mtp", **arguments: Any) -> LLM:
    config = {"method": method, "num_speculative_tokens": 4, "disable_by_batch_size": 1000}
    llm = LLM(str(folder), dtype="float32", max_model_len=128, speculative_config=config, **arguments)
    planner_of(llm).max_rows = 100
    return llm


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids)


def recorded_logits(monkeypatch) -> list[torch.Tensor]:
    """The logits that heads compute from now on."""
    found: list[torch.Tensor] = []
    inner = DraftHead.whole_vocabulary

    def record(self: DraftHead, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        found.extend(logits.float().clone())
        return inner(self, logits, vocab_size)

    monkeypatch.setattr(DraftHead, "whole_vocabulary", record)
    return found


@pytest.mark.parametrize(
    ("architecture", "own", "ranks"),
    [(architecture, False, 1) for architecture in LONGER]
    + [("Glm4MoeForCausalLM", True, 1), ("Glm4MoeForCausalLM", False, 2), ("DeepseekV3ForCausalLM", True, 2)]
    + [("Qwen3NextForCausalLM", False, 2)],
)
def test_the_chain_is_that_of_transformers_layer(architecture, own, ranks, tiny_model, tmp_path, monkeypatch):
    reference = write_model(tiny_model(architecture, **LONGER[architecture]), tmp_path, own)
    logits = recorded_logits(monkeypatch)
    tokens = tokens_of(drafting(tmp_path, tensor_parallel_size=ranks))
    _, expected = reference.chain([*PROMPT, tokens[0]], 4)
    found = torch.log_softmax(torch.stack(logits[:4]), 1)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    # The first row behind a verification reads the target's hidden states again.
    whole = [*PROMPT, *tokens]
    with torch.inference_mode():
        every, _ = reference.step(reference.hidden(whole)[:-1], torch.tensor(whole[1:]))
    assert sum(float((every - row).abs().amax(1).min()) < 1e-3 for row in logits[4:]) >= 2


@pytest.fixture(scope="module")
def expected(target) -> list:
    return answers(LLM(target, dtype="float32", max_model_len=128))


def know(monkeypatch, expected: list) -> None:
    """Make heads propose the tokens of these answers, with mistakes at random places."""
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


def check_answers(folder: str, mode: str, expected: list, monkeypatch) -> None:
    """The answers with the layer are ``expected``."""
    know(monkeypatch, expected)
    llm = drafting(folder, **MODES[mode])
    assert answers(llm, mode != "ranks") == expected
    drafts = llm.engine.stats.drafts
    assert drafts.drafts > drafts.accepted > 20
    if mode == "preempted":
        assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_layer_changes_no_answer(target, expected, mode, monkeypatch):
    if mode == "ranks":
        expected = answers(LLM(target, dtype="float32", max_model_len=128), functions=False)
    check_answers(target, mode, expected, monkeypatch)


@pytest.mark.parametrize("mode", ["chunked", "preempted", "prefix"])
def test_the_layer_of_a_recurrent_model_changes_no_answer(mode, recurrent, monkeypatch):
    check_answers(recurrent, mode, answers(LLM(recurrent, dtype="float32", max_model_len=128)), monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_layer_that_predicts_has_its_tokens_accepted(temperature, tiny_model, tmp_path):
    """Constructed: the next token depends on the last one alone, and the layer passes its embedding on."""
    longer = tiny_model("Glm4MoeForCausalLM", **LONGER["Glm4MoeForCausalLM"])
    width = json.loads((longer / "config.json").read_text())["hidden_size"]
    passes = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    parts = {"enorm": torch.ones(width), "hnorm": torch.ones(width), "eh_proj": passes}
    tensors = load_file(longer / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    parts["shared_head.norm"] = tensors["model.norm.weight"].clone()
    write_model(longer, tmp_path, **parts)
    mtp = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if name not in tensors}
    save_file(tensors | mtp, tmp_path / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
    llm = drafting(tmp_path)
    assert tokens_of(llm, params) == tokens_of(LLM(str(tmp_path), dtype="float32", max_model_len=128), params)
    drafts = llm.engine.stats.drafts
    assert drafts.accepted > 0.8 * drafts.drafts > 10


def test_its_memory_and_its_layers_are_in_the_startup_table(target):
    llm = drafting(target, "glm4_moe_mtp")
    assert llm.engine.scheduler.config.speculation.method == "mtp"
    assert llm.engine.facts["drafts"].startswith("mtp, Glm4MoeForCausalLM")
    assert "left out" not in llm.engine.facts
    assert "model.layers.3" in LLM(target, dtype="float32").engine.facts["left out"]


@pytest.mark.parametrize(
    ("kind", "method"), [("target", "weight_only_int8"), ("target", "gptq"), ("recurrent", "gptq")]
)
def test_quantized_checkpoints_keep_the_layer(kind, method, tmp_path, monkeypatch, request):
    source, folder, ids = request.getfixturevalue(kind), tmp_path / "quantized", tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
    quantize_checkpoint(QuantizeOptions(source, str(folder), method, token_ids=ids, seqlen=32, evaluate=False))
    logits = recorded_logits(monkeypatch)
    plain = tokens_of(LLM(str(folder), dtype="float32", max_model_len=128, cpu_math="exact"))
    assert tokens_of(drafting(folder, cpu_math="exact")) == plain and logits


def test_a_quantized_layer_is_computed_as_it_is_stored(tiny_model, tmp_path, monkeypatch):
    longer = tiny_model("Glm4MoeForCausalLM", **LONGER["Glm4MoeForCausalLM"])
    reference = write_model(longer, tmp_path / "plain")
    options = QuantizeOptions(str(longer), str(tmp_path / "int8"), "weight_only_int8", evaluate=False)
    quantize_checkpoint(options)
    (tmp_path / "int8" / MANIFEST).unlink()  # of a tool that writes none
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    del config["aiakq"]
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    write_files(tmp_path / "int8", tmp_path / "quantized")
    logits = recorded_logits(monkeypatch)
    llm = drafting(tmp_path / "quantized")
    tokens = tokens_of(llm)
    assert "left out" not in llm.engine.facts
    _, expected = reference.chain([*PROMPT, tokens[0]], 1)
    found = torch.log_softmax(logits[0], 0)
    error = (found - expected[0]).norm() / (expected[0] - expected[0].mean()).norm()
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("shared_head.norm", None),
        ("eh_proj", torch.ones(128, 128)),
        ("self_attn.q_norm", None),
        ("self_attn.other", torch.ones(3)),
    ],
)
def test_a_layer_with_other_tensors_is_refused(name, tensor, target, tmp_path):
    kept = load_file(Path(target) / "model.safetensors")
    kept.pop(f"model.layers.3.{name}.weight", None)
    kept |= {} if tensor is None else {f"model.layers.3.{name}.weight": tensor}
    (tmp_path / "config.json").write_text((Path(target) / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AiakqError) as caught:
        drafting(tmp_path)
    assert caught.value.id == "tensor_inventory" and name in caught.value.fields["table"]


def test_a_checkpoint_without_the_layer_is_refused(tiny_model):
    with pytest.raises(AiakqError, match="multi-token prediction for .*, which has none") as caught:
        drafting(tiny_model("LlamaForCausalLM"))
    assert caught.value.id == "unsupported"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"model_impl": "transformers"}, "through transformers"),
        ({"load_format": "dummy"}, "dummy"),
    ],
)
def test_what_cannot_have_the_layer_is_refused(arguments, named, target):
    with pytest.raises(AiakqError, match=named) as caught:
        drafting(target, **arguments)
    assert caught.value.id == "unsupported"


def test_embeddings_of_its_own_have_to_be_there(recurrent, tmp_path):
    config = json.loads((Path(recurrent) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_use_dedicated_embeddings": True}))
    shutil.copy(Path(recurrent) / "model.safetensors", tmp_path)
    with pytest.raises(AiakqError, match="mtp_use_dedicated_embeddings") as caught:
        drafting(tmp_path)
    assert caught.value.id == "unsupported"


def test_a_rotated_model_is_refused(target, tmp_path):
    config = json.loads((Path(target) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"aiakq": {"rotation": "hadamard"}}))
    (tmp_path / "model.safetensors").symlink_to(Path(target) / "model.safetensors")
    with pytest.raises(AiakqError, match="rotated model") as caught:
        drafting(tmp_path)
    assert caught.value.id == "unsupported"


def test_another_model_is_refused(target):
    config = {"method": "mtp", "model": "org/other"}
    with pytest.raises(AiakqError, match="the target's own"):
        LLM(target, dtype="float32", speculative_config=config)
    same = LLM(target, dtype="float32", max_model_len=128, speculative_config=config | {"model": target})
    assert same.engine.facts["drafts"].startswith("mtp")
