"""Names of tensors that transformers merges while it loads them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aiakq.runtime.hf.tensor_names import Joined, TensorNames


def test_tensors_that_are_concatenated_are_told_in_their_order() -> None:
    config = AutoConfig.for_model(
        "kimi_linear", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64, pad_token_id=0
    )
    with torch.device("meta"):
        names = TensorNames(AutoModelForCausalLM.from_config(config))
    layer = "model.layers.0.self_attn"
    parts = tuple(f"{layer}.{each}_conv1d.weight" for each in "qkv")
    experts = [f"model.layers.0.block_sparse_moe.experts.0.w{each}.weight" for each in (1, 2, 3)]
    assert names.joined([*parts[::-1], f"{layer}.A_log", *experts]) == {f"{layer}.conv1d.weight": Joined(parts, 0)}
    assert names.joined(parts[:2]) == {}
