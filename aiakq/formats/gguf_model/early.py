"""The dense families with the names of tensors of GPT-2, BLOOM, Falcon and MPT, see dense.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.formats.gguf_model.dense import NORMS
from aiakq.formats.gguf_model.family import GGUFFamily, GGUFModel, Table
from aiakq.formats.gguf_model.keys import unsupported
from aiakq.formats.gguf_model.rules import GroupedQKV, PlainBeside, Transposed

#: Values that the configs of these families do not have.
_BY_HEADS = {"num_key_value_heads": None, "head_dim": None}


def gpt2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """GPT-2."""
    return {"activation_function": "gelu_new", **_BY_HEADS}


def gpt_bigcode(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """GPT-BigCode, which is SantaCoder's and StarCoder's."""
    multi = config["num_key_value_heads"] == 1
    return {"activation_function": "gelu_pytorch_tanh", "multi_query": multi, **_BY_HEADS}


def falcon(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Falcon."""
    model.keys.fixed("tensor_data_layout", "jploski")
    if model.has("blk.0.attn_qkv.bias"):
        raise unsupported("a GGUF file of a Falcon with biases does not say whether its positions use ALiBi")
    groups, norms = config["num_key_value_heads"], 2 if model.has("blk.0.attn_norm_2.weight") else 1
    newer = groups > 1 or norms == 2
    return {
        "num_kv_heads": groups,
        "ffn_hidden_size": config["intermediate_size"],
        "new_decoder_architecture": newer,
        "num_ln_in_parallel_attn": norms if newer else None,
        "multi_query": not newer,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "intermediate_size": None,
        **_BY_HEADS,
    }


def mpt(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """MPT."""
    keys = model.keys
    alibi = keys.number("attention.max_alibi_bias", 0.0)
    attention = {"alibi": alibi > 0, "alibi_bias_max": alibi or 8, "clip_qkv": keys.number("attention.clamp_kqv", None)}
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise unsupported("the heads of an MPT share keys")
    biased = any(name.endswith(".bias") for name in model.shapes)
    return {
        "attn_config": {"attn_type": "multihead_attention", "qk_ln": False, "prefix_lm": False, **attention},
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "no_bias": not biased,
        "learned_pos_emb": model.has("position_embd.weight"),
        "intermediate_size": None,
        **_BY_HEADS,
    }


def bloom(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """BLOOM."""
    return {"seq_length": config["max_position_embeddings"], "intermediate_size": None, **_BY_HEADS}


_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_GPT2_OUTER: Table = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_NORMS: Table = {"attn_norm": "ln_1", "ffn_norm": "ln_2"}
_WORDS_OUTER: Table = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_WORDS: Table = {
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

EARLY: dict[str, GGUFFamily] = {
    "gpt2": GGUFFamily(
        "GPT2LMHeadModel",
        "gpt2",
        {
            **_GPT2_NORMS,
            "attn_qkv": Transposed("attn.c_attn"),
            "attn_output": Transposed("attn.c_proj"),
            "ffn_up": Transposed("mlp.c_fc"),
            "ffn_down": Transposed("mlp.c_proj"),
        },
        _GPT2_OUTER,
        gpt2,
        layers="transformer.h.{layer}.",
        epsilon="layer_norm_epsilon",
        sizes=_GPT2_SIZES,
        rotary=False,
    ),
    "starcoder": GGUFFamily(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        {
            **_GPT2_NORMS,
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _GPT2_OUTER,
        gpt_bigcode,
        layers="transformer.h.{layer}.",
        epsilon="layer_norm_epsilon",
        sizes=_GPT2_SIZES,
        rotary=False,
    ),
    "falcon": GGUFFamily(
        "FalconForCausalLM",
        "falcon",
        {
            **_WORDS,
            "attn_norm_2": "ln_attn",
            "attn_norm": PlainBeside("ln_mlp", "attn_norm_2", "input_layernorm"),
            "attn_qkv": GroupedQKV("self_attention.query_key_value"),
        },
        _WORDS_OUTER,
        falcon,
        layers="transformer.h.{layer}.",
        epsilon="layer_norm_epsilon",
    ),
    "bloom": GGUFFamily(
        "BloomForCausalLM",
        "bloom",
        {
            **NORMS,
            **_WORDS,
            "attn_qkv": GroupedQKV("self_attention.query_key_value", by_head=True),
        },
        _WORDS_OUTER,
        bloom,
        layers="transformer.h.{layer}.",
        epsilon="layer_norm_epsilon",
        sizes={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        rotary=False,
    ),
    "mpt": GGUFFamily(
        "MptForCausalLM",
        "mpt",
        {
            "attn_norm": "norm_1",
            "ffn_norm": "norm_2",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
        },
        mpt,
        layers="transformer.blocks.{layer}.",
        epsilon="layer_norm_epsilon",
        sizes={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        rotary=False,
    ),
}
