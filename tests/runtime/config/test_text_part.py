"""Multimodal checkpoints: the text model inside is configured, found in the file and served; the rest is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.text_part import text_part
from aiakq.runtime.inspect.inspection import inspect_checkpoint

PROMPTS = [[5, 9, 40], list(range(10, 60)), [7] * 17]
#: How multimodal files call the text model's tensors, and its output layer.
SPELLINGS = {
    "old": ("language_model.model.", "language_model.lm_head."),
    "new": ("model.language_model.", "lm_head."),
}


def tokens(folder: Path, **arguments: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=65, **arguments)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm


def multimodal(text: Path, folder: Path, architecture: str, spelling: str) -> Path:
    """A checkpoint that holds the model of ``text`` beside a vision tower."""
    folder.mkdir()
    layers, head = SPELLINGS[spelling]
    tensors = {
        (head + name.removeprefix("lm_head."))
        if name.startswith("lm_head.")
        else layers + name.removeprefix("model."): x
        for name, x in load_file(text / "model.safetensors").items()
    }
    tensors["vision_tower.patches.weight"] = torch.ones(3, 4)
    tensors["multi_modal_projector.linear.weight"] = torch.ones(2, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in text.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    inside = json.loads((text / "config.json").read_text())
    whole = {"architectures": [architecture], "model_type": "any", "text_config": inside, "vision_config": {"depth": 3}}
    whole["eos_token_id"] = inside.pop("eos_token_id")
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "MistralForCausalLM", "Qwen3_5ForCausalLM"])
def test_the_text_part_is_served_and_the_rest_is_named(architecture, spelling, tiny_model, tmp_path):
    text = tiny_model(architecture)
    folder = multimodal(text, tmp_path / "model", "SomeForConditionalGeneration", spelling)
    found, llm = tokens(folder)
    assert found == tokens(text)[0]
    assert llm.engine.facts["model part"] == (
        "text only: 2 tensors of multi_modal_projector, vision_tower are left out"
    )
    assert "model part" not in tokens(text)[1].engine.facts
    assert inspect_checkpoint(str(folder), device="cpu").differences == ()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_part_is_served_through_transformers(spelling, tiny_model, tmp_path, caplog):
    text = tiny_model("ArceeForCausalLM")
    folder = multimodal(text, tmp_path / "model", "SomeForConditionalGeneration", spelling)
    found, llm = tokens(folder)
    assert found == tokens(text)[0]
    assert "inside transformers" in llm.engine.facts["linear layers"]
    assert llm.engine.facts["model part"].startswith("text only: 2 tensors")
    assert "does not use" not in caplog.text


def test_a_missing_tensor_of_the_text_part_is_still_missed(tiny_model, tmp_path):
    folder = multimodal(tiny_model("MistralForCausalLM"), tmp_path / "model", "X", "new")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AiakqError, match=r"1 tensor \(1 missing\)"):
        tokens(folder)


def test_what_a_text_config_leaves_out_is_the_default_of_its_class():
    """As in the files of Gemma 3: 4 B."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    config = ModelConfig.from_hf(raw)
    assert config.architecture == "Gemma3ForCausalLM" and config.tie_word_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.rope_of(5)[1] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert config.rope_of(6)[1] == {"rope_type": "default", "rope_theta": 1e4}


def test_the_outer_config_ties_the_output_layer():
    """As transformers saves Qwen3.5: a tied model has false inside."""
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True}
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": False}
    assert ModelConfig.from_hf({**raw, "text_config": text}).tie_word_embeddings


def test_keys_of_published_qwen35_are_understood():
    """Keys that transformers' class does not have, and the values with which it computes."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1}
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    assert ModelConfig.from_hf({**raw, "text_config": text}).architecture == "Qwen3_5ForCausalLM"
    for key, value in (("attn_output_gate", False), ("mamba_ssm_dtype", "bfloat16"), ("output_gate_type", "sigmoid")):
        with pytest.raises(AiakqError, match=f"{key} = {value!r}"):
            ModelConfig.from_hf({**raw, "text_config": {**text, key: value}})


def test_impossible_values_inside_are_refused():
    text = {"model_type": "gemma3_text", "hidden_size": "many"}
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf({"architectures": ["X"], "text_config": text})
    assert caught.value.id == "model_malformed"


def test_a_text_config_without_a_type_has_that_of_the_outer_class():
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw = {"architectures": ["X"], "text_config": text, "vision_config": {}}
    assert ModelConfig.from_hf({**raw, "model_type": "internvl"}).architecture == "Qwen2ForCausalLM"
    with pytest.raises(AiakqError) as caught:
        ModelConfig.from_hf({**raw, "model_type": "mystery"})
    assert caught.value.id == "text_model_unnamed" and "--hf-overrides" in str(caught.value)


def test_files_of_qwen2_vl_have_no_text_config():
    raw = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 64}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    raw |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": {"depth": 2}}
    raw |= {"intermediate_size": 96, "vision_start_token_id": 7, "image_token_id": 8, "video_token_id": 9}
    raw |= {"attention_dropout": 0.0, "max_window_layers": 2, "use_sliding_window": False, "sliding_window": 32768}
    config = ModelConfig.from_hf(raw)
    assert (config.architecture, config.num_layers, config.hidden_size) == ("Qwen2ForCausalLM", 2, 64)
    assert config.rope_of(0)[1]["rope_type"] == "default" and config.sliding_windows == (None, None)


def test_a_checkpoint_without_other_parts_has_none(tiny_model):
    assert Checkpoint.open(tiny_model("MistralForCausalLM")).beside_text == frozenset()


def test_experts_of_qwen3_vl_are_normalized():
    text = {"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2}
    raw = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    config = ModelConfig.from_hf(raw)
    assert config.architecture == "Qwen3MoeForCausalLM" and config.raw["norm_topk_prob"] is True
    with pytest.raises(AiakqError, match="norm_topk_prob is false"):
        ModelConfig.from_hf({**raw, "text_config": {**text, "norm_topk_prob": False}})


@pytest.mark.parametrize(
    "given", [{}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}]
)
def test_values_that_a_text_part_of_voxtral_leaves_out_are_those_of_transformers(given):
    from transformers import VoxtralConfig

    raw = {"model_type": "voxtral", "text_config": {"model_type": "llama", **given}, "audio_config": {}}
    expected = VoxtralConfig(**raw).text_config.to_dict()
    found = text_part(raw)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps")
    for name in (*names, "intermediate_size", "max_position_embeddings", "num_attention_heads", "rope_parameters"):
        assert found[name] == expected[name], name
