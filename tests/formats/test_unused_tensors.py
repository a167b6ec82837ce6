"""Tensors that aiakq does not use: scales of KV caches under every name, and modules outside the text model."""

from __future__ import annotations

import pytest

from aiakq.formats.left_out import beside_model, describe, is_cache_scale, prediction_layers


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
        *(f"model.layers.0.self_attn.{each}" for each in ("key_scale", "value_scale", "k_scales", "v_zeros", "k_amax")),
        *(f"model.layers.0.self_attn.{each}" for each in ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")),
        *(f"model.layers.0.self_attn.{each}" for each in ("kv_orig_quant_scale", "attn.kv_cache.k_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_proj.output_quantizer._amax", "W_pack.output_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("kv_fake_quantizer.qscale_act", "q_bmm_quantizer._scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("kv_a_proj_with_mqa.output_scale", "kv_b_proj.k_scale")),
        *(f"transformer.h.0.attn.{each}" for each in ("c_attn.output_scale", "c_attn.output_quantizer._amax")),
        "transformer.blocks.0.attn.Wqkv.output_scale",
        "transformer.h.0.self_attention.query_key_value.output_scale",
        "model.layers.0.mixer.k_proj.k_scale",
        "transformer.h.0.attn.k_scale",
        *(
            f"model.layers.0.self_attn.{each}"
            for each in ("attn._k_scale", "k_scale_float", "fa_q.scale", "fa_k.offset")
        ),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_zp", "past_key_scale", "attn.kv_cache_k_scale")),
        *(f"model.layers.0.self_attn.{each}" for each in ("k_proj.out_scale", "v_static_scale")),
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
        "model.layers.0.self_attn.k_proj.input_quantizer._amax",
        "model.layers.0.self_attn.o_proj.output_quantizer._amax",
        "model.layers.0.mlp.down_proj.output_quantizer._amax",
        "model.layers.0.block_sparse_moe.experts.0.w1.k_scale",
        "transformer.h.0.mlp.c_proj.output_scale",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.o_proj.out_scale",
        "model.layers.0.self_attn.fa_norm.scale",
    ],
)
def test_scales_of_weights_and_activations_are_not_those_of_caches(name):
    assert not is_cache_scale(name)


def test_only_modules_outside_the_model_are_left_out():
    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    extra = {"v_head.summary.weight", "medusa_head.0.0.linear.weight", "lm_head.bias", "model.layers.9.norm.weight"}
    assert beside_model(extra, used) == {"v_head.summary.weight", "medusa_head.0.0.linear.weight"}
    assert beside_model({"norm.bias"}, {"norm.weight", "layers.0.mlp.up_proj"}) == set()


@pytest.mark.parametrize(
    "name",
    [
        "model.mtp.layers.0.fc.weight",
        "model.visual.patch_embed.weight",
        "model.vision_tower.a.b",
        "model.mm_projector.w",
    ]
    + ["transformer.visual.conv1.weight", "model.mtp_layers.0.norm.weight", "mtp.fc.weight"],
)
def test_modules_that_text_does_not_pass_through_are_left_out(name):
    assert beside_model({name, "model.visible.weight"}, {"model.norm.weight"}) == {name}


def test_layers_beyond_the_model_are_left_out_only_if_they_predict_further_tokens():
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.1.enorm.weight"]
    assert prediction_layers(extra, 2) == ("model.layers.2.",)
    assert prediction_layers(["model.layers.2.mlp.up_proj.weight"], 2) == ()
    assert prediction_layers(["language_model.model.layers.5.shared_head.norm.weight"], 5) == (
        "language_model.model.layers.5.",
    )


def test_what_is_left_out_is_described_by_kind():
    names = ["v_head.summary.weight", "v_head.summary.bias", "model.layers.0.self_attn.k_scale"]
    assert describe(names) == [
        "1 scales of a quantized KV cache, which has scales of its own here",
        "2 tensors beside the model: v_head",
    ]
    assert describe(["model.mtp.fc.weight", "model.layers.2.eh_proj.weight"]) == [
        "2 tensors beside the model: model.layers.2, model.mtp"
    ]
    assert describe([]) == []
