"""Values in the config.json of a family that change what it computes, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_comparison import TOLERANCE, TOLERANCES, largest_difference, of_transformers, ours, rewritten
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory

PLAIN = {"rope_theta": 1e4, "rope_type": "default"}


def test_biases_of_falcon_are_not_rounded(tiny_model, monkeypatch):
    """transformers rounds ALiBi's biases to bfloat16, exactly only for powers of two and up to 256 tokens."""
    settings = {"hidden_size": 192, "num_attention_heads": 6, "multi_query": False, "parallel_attn": False}
    folder = tiny_model("FalconForCausalLM", alibi=True, **settings)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda slopes: slopes)
    expected = of_transformers(folder)
    monkeypatch.undo()
    assert largest_difference(ours(folder), expected) < TOLERANCE


def test_minimax_rotates_the_first_elements_of_heads_that_its_authors_state(tiny_model, tmp_path):
    """transformers ignores ``rotary_dim``: there, the same with other elements as pairs, and others not rotated."""
    folder = rewritten(tiny_model("MiniMaxForCausalLM"), tmp_path / "model", {"rotary_dim": 16})
    order = torch.tensor([*range(8), *range(16, 32), *range(8, 16), *range(32, 48)])

    def change(model: Any) -> None:
        rotary, attention = model.model.rotary_emb, model.model.layers[1].self_attn
        base = model.config.rope_parameters["rope_theta"]
        rotary.inv_freq = torch.cat([base ** (-torch.arange(8.0) / 8), torch.zeros(16)])
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.copy_(linear.weight.unflatten(0, (-1, 48))[:, order].flatten(0, 1))

    assert largest_difference(ours(folder), of_transformers(folder, change)) < TOLERANCE


def test_a_rotary_scaling_that_norms_of_llama4_undo_is_refused(tiny_model, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "original_max_position_embeddings": 64}
    source, plain = tiny_model("Llama4ForCausalLM"), {"rope_parameters": {**yarn, "attention_factor": 1.0}}
    with pytest.raises(AiakqError, match="yarn with an attention_factor in a Llama4ForCausalLM"):
        ours(rewritten(source, tmp_path / "model", {"rope_parameters": yarn}))
    folder = rewritten(source, tmp_path / "plain", plain)
    assert largest_difference(ours(folder), of_transformers(folder)) < TOLERANCE


@pytest.mark.parametrize("family", ["GPTJ", "CodeGen"])
def test_a_rotary_dim_is_not_cut(family, tiny_model):
    """88 * (60 / 88) is less than 60 in floating point."""
    folder = tiny_model(f"{family}ForCausalLM", n_embd=352, rotary_dim=60)
    assert largest_difference(ours(folder), of_transformers(folder)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("GPTJ", {"rotary_dim": 7}, "rotary_dim is 7, and head_dim 32"),
        ("CodeGen", {"rotary_dim": 7}, "rotary_dim is 7, and head_dim 32"),
        ("MiniMax", {"rotary_dim": "16"}, "rotary_dim is '16', and head_dim 48"),
        ("Phi", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.22}}, "7 elements of each head"),
        ("StableLm", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.22}}, "7 elements of each head"),
    ],
)
def test_elements_that_are_no_pairs_are_not_rotated(family, config, words, tiny_model, tmp_path):
    """transformers' classes fail there."""
    folder = rewritten(tiny_model(f"{family}ForCausalLM"), tmp_path / "model", config)
    with pytest.raises(AiakqError, match=words):
        ours(folder)


@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "FalconMamba"])
def test_a_rescaled_initialization_does_not_rescale_what_is_loaded(family, tiny_model, tmp_path):
    """transformers' from_pretrained does, by an operation of its initialization that does not look at the file."""
    source, folder = tiny_model(f"{family}ForCausalLM"), tmp_path / "model"
    rewritten(source, folder, {"rescale_prenorm_residual": True})

    def load_again(model: Any) -> None:
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)

    tolerance = TOLERANCES.get(f"{family}ForCausalLM", TOLERANCE)
    assert largest_difference(ours(folder), of_transformers(folder, load_again)) < tolerance


@pytest.mark.parametrize("family", ["MiniMax", "MiniMaxM2"])
def test_a_rotary_dim_of_minimax_beside_another_part_of_heads_is_refused(family, tiny_model, tmp_path):
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = {"rotary_dim": 16, "rope_parameters": rope}
    folder = rewritten(tiny_model(f"{family}ForCausalLM"), tmp_path / "model", config)
    with pytest.raises(AiakqError, match=r"its rotary_dim is 16, its partial_rotary_factor 0\.5, and head_dim 48"):
        ours(folder)


def test_minimax_with_two_lists_of_layers_that_differ_is_refused(tiny_model, tmp_path):
    kept, other = (tmp_path / name for name in ("kept", "other"))
    ours(rewritten(tiny_model("MiniMaxForCausalLM"), kept, {"attn_type_list": [0, 1, 0]}))
    with pytest.raises(AiakqError, match="attn_type_list has other layers"):
        ours(rewritten(tiny_model("MiniMaxForCausalLM"), other, {"attn_type_list": [0, 1, 1]}))


def test_convolutions_may_have_more_channels_than_the_file_has_tensors(tiny_model):
    folder = tiny_model("KimiLinearForCausalLM", linear_num_heads=64)
    checkpoint = Checkpoint.open(folder)
    assert check_inventory(ModelConfig.from_hf(checkpoint.config), checkpoint) == set()


def test_dense_layers_of_kimi_linear_are_read_under_both_names(tiny_model, tmp_path):
    folder = tiny_model("KimiLinearForCausalLM")
    renamed = rewritten(folder, tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.replace("layers.0.block_sparse_moe", "layers.0.mlp") for name in tensors}
    assert sum(name != new for name, new in names.items()) == 3
    save_file({names[name]: tensor for name, tensor in tensors.items()}, renamed / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(ours(folder), ours(renamed), strict=True))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("Mamba2", "expand"), ("FalconMamba", "state_size"), ("Qwen3Next", "linear_num_value_heads")],
)
def test_sizes_that_no_model_has_are_refused(architecture, name, tiny_model, tmp_path):
    folder = rewritten(tiny_model(f"{architecture}ForCausalLM"), tmp_path / "model", {name: 2**26})
    with pytest.raises(AiakqError, match="linear_num_value_heads|outputs|do not make|A_log"):
        ours(folder)


def test_gates_of_lfm3_may_have_the_name_of_their_module(tiny_model, tmp_path):
    source = tiny_model("Lfm3ForCausalLM")
    folder = rewritten(source, tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace(".gate_proj.", ".g_proj."): tensor for name, tensor in tensors.items()}
    assert named.keys() != tensors.keys()
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    assert largest_difference(ours(folder), ours(source)) == 0


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma2", "Cohere", "Olmo2", "Granite", "Exaone4", "DeepseekV2", "DeepseekV3", "MiniMax"]
)
def test_a_part_of_heads_that_transformers_would_not_rotate_alone_is_refused(family, tiny_model, tmp_path):
    folder = rewritten(tiny_model(f"{family}ForCausalLM"), tmp_path / "model", {"partial_rotary_factor": 0.5})
    with pytest.raises(AiakqError, match=f"partial_rotary_factor 0.5 in a {family}ForCausalLM"):
        ours(folder)
