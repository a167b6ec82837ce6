"""GPTQ on disk: words written by hand, groups in any order, and ``dynamic`` rules for single layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

W4 = LayerSpec(4, 32)
W8 = LayerSpec(8, -1)
W8G = LayerSpec(8, 32)
DOWN = "model.layers.0.mlp.down_proj"


def test_gptq_words_written_by_hand(as_words: Callable[[torch.Tensor], list[str]]) -> None:
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[0, :8] = torch.arange(8)
    weight = QWeight("w4a16", codes, torch.ones(32, 1))
    tensors = formats.load("gptq").write(weight, QuantSpec("gptq", "gptq", 4), torch.float16)
    assert as_words(tensors["qweight"])[0] == "76543210"  # row 0 of words, output 0
    assert set(as_words(tensors["qzeros"])) == {"77777777"}
    assert tensors["g_idx"].tolist() == [0] * 32
    assert tensors["g_idx"].dtype == torch.int32
    tensors = formats.load("gptq_v2").write(weight, QuantSpec("gptq", "gptq_v2", 4), torch.float16)
    assert set(as_words(tensors["qzeros"])) == {"88888888"}
    for bits, expected in ((8, ["7f7f7f7f"]), (3, ["db6db6db", "b6db6db6", "6db6db6d"])):
        weight = QWeight(f"w{bits}a16", codes, torch.ones(32, 1))
        tensors = formats.load("gptq").write(weight, QuantSpec("gptq", "gptq", bits), torch.float16)
        assert as_words(tensors["qzeros"])[: len(expected)] == expected


def test_group_indices_of_act_order_round_trip(
    random_weight: Callable[..., QWeight], same_weight: Callable[[QWeight, QWeight], None]
) -> None:
    weight = random_weight("w4a16")
    g_idx = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(3))]
    weight.perm = torch.argsort(g_idx, stable=True)
    spec = QuantSpec("gptq", "gptq", 4, group_size=32, desc_act=True)
    module = formats.load("gptq")
    tensors = module.write(weight, spec, torch.float16)
    assert tensors["g_idx"].tolist() == g_idx.tolist()
    same_weight(module.read(tensors, spec), weight)


def test_the_bit_width_comes_from_the_shapes(
    random_weight: Callable[..., QWeight], same_weight: Callable[[QWeight, QWeight], None]
) -> None:
    """A tool's per-layer override leaves the config's width wrong; the tensors are right."""
    weight = random_weight("w8a16")
    module = formats.load("gptq")
    tensors = module.write(weight, QuantSpec("gptq", "gptq", 8, group_size=32), torch.float16)
    same_weight(module.read(tensors, QuantSpec("gptq", "gptq", 4, group_size=16)), weight)


def test_gptq_says_it_with_dynamic():
    spec = QuantSpec(
        "gptq",
        "gptq",
        4,
        32,
        ignore=("lm_head", DOWN),
        layers=(("model.layers.1.self_attn.q_proj", W8G), ("*.up_proj", W8)),
    )
    config = quantization_config.write(spec)
    assert config["lm_head"] is False
    assert list(config["dynamic"]) == [
        r"-:^model\.layers\.0\.mlp\.down_proj$",
        r"+:^model\.layers\.1\.self_attn\.(q_proj|qkv_proj)$",
        r"+:^.*\.up_proj$",
    ]
    again = quantization_config.read(config)
    assert again.for_layer(DOWN) is None and again.for_layer("lm_head") is None
    assert again.for_layer("model.layers.1.self_attn.q_proj").layer == W8G
    assert again.for_layer("model.layers.1.self_attn.qkv_proj").layer == W8G  # vLLM's name for three in one
    assert again.for_layer("model.layers.1.self_attn.o_proj").layer == W4
    head = quantization_config.read(quantization_config.write(replace(spec, ignore=(), layers=(("lm_head", W8),))))
    assert head.for_layer("lm_head").bits == 8


@pytest.mark.slow
def test_gptqmodel_reads_dynamic(tiny_model, tmp_path):
    """GPTQModel's own rules give each layer what ours give it."""
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.config import dynamic_get

    spec = QuantSpec(
        "gptq", "gptq", 4, 32, ignore=("lm_head", DOWN), layers=(("model.layers.1.self_attn.q_proj", W8G),)
    )
    dynamic = quantization_config.write(spec)["dynamic"]
    assert dynamic_get(dynamic, DOWN) is False
    assert dynamic_get(dynamic, "model.layers.1.self_attn.q_proj", "bits", 4) == 8
    assert dynamic_get(dynamic, "model.layers.0.self_attn.q_proj", "bits", 4) == 4


def test_first_dynamic_rule_wins():
    dynamic = {r"-:.*down.*": {}, r"+:.*\.1\..*": {"bits": 8, "sym": False}, r".*up.*": {"group_size": 128}}
    spec = quantization_config.read(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": dynamic}
    )
    assert spec.for_layer("model.layers.1.mlp.down_proj") is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").layer == LayerSpec(8, 32, symmetric=False)
    assert spec.for_layer("model.layers.0.mlp.up_proj").layer == LayerSpec(4, 128)
    assert spec.for_layer("model.layers.0.mlp.gate_proj").layer == LayerSpec(4, 32)
