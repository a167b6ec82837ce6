"""Names of tensors that transformers merges while it loads them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aiakq.runtime.hf.tensor_names import TensorNames


def test_tensors_that_are_concatenated_are_told_with_their_places() -> None:
    config = AutoConfig.for_model(
        "kimi_linear", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64, pad_token_id=0
    )
    with torch.device("meta"):
        names = TensorNames(AutoModelForCausalLM.from_config(config))
    layer = "model.layers.0.self_attn"
    places = [names.concatenated(f"{layer}.{each}_conv1d.weight") for each in "qkv"]
    assert places == [(f"{layer}.conv1d.weight", place) for place in range(3)]
    others = ("q_proj.weight", "A_log", "conv1d.weight", "x_conv1d.weight")
    assert [names.concatenated(f"{layer}.{other}") for other in others] == [None] * 4
    assert names.concatenated("model.layers.0.block_sparse_moe.experts.0.w2.weight") is None
