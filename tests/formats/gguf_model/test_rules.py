"""Sources against what llama.cpp's converter does, transcribed."""

from __future__ import annotations

import torch

from aiakq.formats.gguf_model.rules import (
    GroupedQKV,
    RotatedKeys,
    RotatedQueries,
    Shifted,
    SplitQKV,
    Stored,
    Transposed,
)
from aiakq.formats.gguf_model.sparse import interleaved_columns, latent_rows

CONFIG = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 48}


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As ``LlamaModel.permute``."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def read(rule, stored: torch.Tensor, name: str = "blk.0.attn.weight") -> dict[str, torch.Tensor]:
    suffix = name.rpartition(".")[2]
    sources = rule.sources(Stored(name, suffix, CONFIG, {name: tuple(stored.shape)}))
    return {target: source.read(lambda _: stored) for target, source in sources}


def test_queries_and_keys_are_those_before_the_permutation():
    for rule, heads in ((RotatedQueries("q"), 6), (RotatedKeys("q"), 2)):
        weight, bias = torch.randn(heads * 8, 5), torch.randn(heads * 8)
        assert torch.equal(read(rule, permuted(weight, heads))["q.weight"], weight)
        assert torch.equal(read(rule, permuted(bias, heads), "blk.0.attn.bias")["q.bias"], bias)


def test_fused_projections_are_split_and_permuted_back():
    q, k, v = torch.randn(48, 5), torch.randn(16, 5), torch.randn(16, 5)
    plain = read(SplitQKV("q", "k", "v"), torch.cat([q, k, v]))
    other = read(SplitQKV("q", "k", "v", interleaved=True), torch.cat([permuted(q, 6), permuted(k, 2), v]))
    for name, value in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(plain[f"{name}.weight"], value) and torch.equal(other[f"{name}.weight"], value)


def test_groups_of_heads_get_their_keys_and_values_back():
    """As ``FalconModel.modify_tensors``."""
    weight = torch.randn((6 + 2 * 2) * 8, 48)
    qkv = weight.view(2, 5, 8, 48)
    parts = qkv[:, :-2].reshape(48, 48), qkv[:, [-2]].reshape(16, 48), qkv[:, [-1]].reshape(16, 48)
    assert torch.equal(read(GroupedQKV("qkv"), torch.cat(parts))["qkv.weight"], weight)


def test_norms_lose_the_one_and_matrices_are_turned_back():
    weight = torch.randn(7, 5)
    assert torch.allclose(read(Shifted("norm"), weight[0] + 1)["norm.weight"], weight[0], atol=1e-6)
    assert torch.equal(read(Transposed("c_fc"), weight.T.contiguous())["c_fc.weight"], weight)
    assert torch.equal(read(Transposed("c_fc"), weight[0], "blk.0.attn.bias")["c_fc.bias"], weight[0])


def test_latent_projections_are_joined_by_head():
    """As ``DeepseekV2Model.modify_tensors``: 3 heads of 4 + 5 elements over latents of 6."""
    weight = torch.randn(3 * 9, 6)
    k, v = weight.view(3, 9, 6).split([4, 5], dim=1)
    assert torch.equal(latent_rows([k.transpose(1, 2), v]), weight)


def test_gate_and_up_of_experts_alternate():
    """As ``GptOssModel.modify_tensors``."""
    both, bias = torch.randn(3, 4, 10), torch.randn(3, 10)
    turned = both.transpose(-1, -2)
    assert torch.equal(interleaved_columns([turned[:, ::2], turned[:, 1::2]]), both)
    assert torch.equal(interleaved_columns([bias[:, ::2], bias[:, 1::2]]), bias)
