"""Relatives of Llama: what a family can replace of DecoderBuilder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.runtime.layers.rotary import rotary_tables
from aiakq.runtime.models import llama
from aiakq.runtime.models.builder import DecoderBuilder, Names

PROMPTS = [[5, 9, 40], list(range(10, 60)), [7] * 17]


def tokens(folder: Path) -> list[list[int]]:
    llm = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=65)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def fuse(folder: Path, output: Path) -> Path:
    """The checkpoint with queries, keys and values of a layer in one tensor."""
    shutil.copytree(folder, output)
    tensors = load_file(output / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def test_a_family_can_store_queries_keys_and_values_as_one_tensor(tiny_model, tmp_path, monkeypatch):
    folder = tiny_model("LlamaForCausalLM")
    expected = tokens(folder)

    def build(config, weights):
        class Builder(DecoderBuilder):
            names = Names(qkv=("self_attn.qkv_proj",))

        return Builder(config, weights).build()

    monkeypatch.setattr(llama, "build", build)
    assert tokens(fuse(folder, tmp_path / "fused")) == expected


def test_a_family_can_have_rotary_tables_of_its_own(tiny_model, monkeypatch):
    folder = tiny_model("LlamaForCausalLM")
    other = tiny_model("LlamaForCausalLM", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    expected = tokens(other)
    assert tokens(folder) != expected

    def build(config, weights):
        rope = json.loads((other / "config.json").read_text())["rope_parameters"]
        rotary = rotary_tables(rope, config.head_dim, config.max_position, weights.ops.device)

        class Builder(DecoderBuilder):
            def rotary(self, layer):
                return rotary

        return Builder(replace(config, rope={"rope_type": "unknown"}), weights).build()

    monkeypatch.setattr(llama, "build", build)
    assert tokens(folder) == expected
