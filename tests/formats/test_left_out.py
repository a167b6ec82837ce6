"""Tensors that aiakq does not use: scales of KV caches under every name, and modules beside the model."""

from __future__ import annotations

import pytest

from aiakq.formats.left_out import beside_model, describe, is_cache_scale


@pytest.mark.parametrize(
    "name",
    [
        *(f"model.layers.0.self_attn.{each}" for each in ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_zero_point", "v_zero_point", "prob_output_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("attn.k_scale", "mla_attn.v_scale", "k_global_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_proj.output_scale", "v_proj.output_zero_point")),
        *(
            f"model.layers.0.self_attn.{each}"
            for each in ("k_cache.scale", "v_cache.scale", "q.scale", "kv_cache_scale")
        ),
        "model.layers.0.self_attn.k_bmm_quantizer._amax",
        "model.layers.0.mixer.k_proj.k_scale",
        "transformer.h.0.attn.k_scale",
    ],
)
def test_scales_of_caches_are_known_by_every_name(name):
    assert is_cache_scale(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.mlp.down_proj.scale",
        "model.layers.0.self_attn.k_proj.scales",
        "model.layers.0.self_attn.k_norm.weight",
    ],
)
def test_scales_of_weights_and_activations_are_not_those_of_caches(name):
    assert not is_cache_scale(name)


def test_only_modules_beside_the_model_are_left_out():
    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    extra = {"v_head.summary.weight", "medusa_head.0.0.linear.weight", "lm_head.bias", "model.layers.9.norm.weight"}
    assert beside_model(extra, used) == {"v_head.summary.weight", "medusa_head.0.0.linear.weight"}
    assert beside_model({"norm.bias"}, {"norm.weight", "layers.0.mlp.up_proj"}) == set()


def test_what_is_left_out_is_described_by_kind():
    names = ["v_head.summary.weight", "v_head.summary.bias", "model.layers.0.self_attn.k_scale"]
    assert describe(names) == [
        "1 scales of a quantized KV cache, which has scales of its own here",
        "2 tensors beside the model: v_head",
    ]
    assert describe([]) == []
