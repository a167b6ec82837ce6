"""The dense families of llama.cpp: their names in Hugging Face checkpoints, and their settings.

Facts from llama.cpp's converter and its tables of names. Families whose queries and keys the converter permutes have
``RotatedQueries`` and ``RotatedKeys`` in their tables; those that other families compute exactly are read as these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.formats.gguf_model.family import GGUFFamily, GGUFModel, Table, per_layer_windows
from aiakq.formats.gguf_model.keys import unsupported
from aiakq.formats.gguf_model.rules import (
    Reshaped,
    RotatedKeys,
    RotatedQueries,
    Shifted,
    SplitQKV,
    Stored,
    Unread,
)

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTER: Table = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NORMS: Table = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
MLP: Table = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PROJECTIONS: Table = {
    "attn_q": ATTENTION[0],
    "attn_k": ATTENTION[1],
    "attn_v": ATTENTION[2],
    "attn_qkv": SplitQKV(*ATTENTION),
    "attn_output": "self_attn.o_proj",
    "attn_rot_embd": Unread(),
}
#: Those of families with interleaved rotary embedding.
PERMUTED: Table = {
    **PROJECTIONS,
    "attn_q": RotatedQueries(ATTENTION[0]),
    "attn_k": RotatedKeys(ATTENTION[1]),
    "attn_qkv": SplitQKV(*ATTENTION, interleaved=True),
}
HEAD_NORMS: Table = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA: Table = {**NORMS, **PROJECTIONS, **MLP}
LLAMA_PERMUTED: Table = {**NORMS, **PERMUTED, **MLP}
_GEMMA_OUTER: Table = {**OUTER, "output_norm": Shifted("model.norm")}
_GEMMA: Table = {
    **LLAMA,
    "attn_norm": Shifted("input_layernorm"),
    "ffn_norm": Shifted("post_attention_layernorm"),
}
_GEMMA2: Table = {
    **_GEMMA,
    "post_attention_norm": Shifted("post_attention_layernorm"),
    "ffn_norm": Shifted("pre_feedforward_layernorm"),
    "post_ffw_norm": Shifted("post_feedforward_layernorm"),
}
#: Norms after attention and MLP, as OLMo 2 and EXAONE 4 have them.
OUTPUT_NORMS: Table = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Dimensions of Mistral 7B v0.1, whose window of 4096 positions the converter does not store.
_MISTRAL_V1 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
}


def attention_biases(model: GGUFModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return attention_bias and mlp_bias, which the tensors tell."""
    biased = any(model.has(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))
    return {"attention_bias": biased, "mlp_bias": model.has("blk.0.ffn_down.bias")}


def llama(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Llama and Mistral."""
    window = model.keys.integer("attention.sliding_window", None, low=0)
    if window or all(config.get(name) == value for name, value in _MISTRAL_V1.items()):
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return {**mistral, "sliding_window": window or 4096}
    return attention_biases(model, config)


def qwen(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Qwen, whose feed_forward_length counted gate and up."""
    keys = model.keys
    keys.ignore("use_parallel_residual", "attention.max_alibi_bias")
    shape = model.shapes.get("blk.0.ffn_down.weight", (0, 0))
    return {"intermediate_size": shape[-1]}


def gemma(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Gemma."""
    return {"hidden_act": "gelu_pytorch_tanh"}


def _query_scalar(model: GGUFModel, config: Mapping[str, Any], layers_27b: int) -> float:
    """Return query_pre_attn_scalar, which llama.cpp derives: the size of heads, except in the models of 27 billion."""
    scale = model.keys.number("attention.scale", None)
    if scale:
        return float(round(scale**-2, 3))
    width = config["hidden_size"] // config["num_attention_heads"]
    return float(width if config["num_hidden_layers"] == layers_27b else config["head_dim"])


def gemma2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Gemma 2."""
    keys = model.keys
    windows = per_layer_windows(model, config, 2) if keys.has("attention.sliding_window") else {"sliding_window": 4096}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(model, config, 46),
        **windows,
    }


def gemma3(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Gemma 3, the text model."""
    keys = model.keys
    local = {"rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": keys.number("final_logit_softcapping", None) or None,
        "query_pre_attn_scalar": _query_scalar(model, config, 62),
        "rope_theta": keys.number("rope.freq_base", 1000000.0),
        **local,
        **per_layer_windows(model, config | local, 6),
    }


def phi2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Phi-1 to Phi-2."""
    model.keys.fixed("attention.head_count_kv", config["num_attention_heads"])
    return {"hidden_act": "gelu_new", "qk_layernorm": False, "head_dim": None}


def phi3(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Phi-3 and Phi-4."""
    original = model.keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = model.keys.integer("attention.sliding_window", None, low=0) or None
    return {"original_max_position_embeddings": original, "sliding_window": window, "head_dim": None}


def starcoder2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """StarCoder 2; the converter does not store its window, which all published sizes have."""
    window = model.keys.integer("attention.sliding_window", 4096, low=0) or None
    biased = model.has("blk.0.attn_q.bias") or model.has("blk.0.attn_qkv.bias")
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": biased, "sliding_window": window, "head_dim": None}


def cohere(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Cohere's Command R."""
    return {"logit_scale": model.keys.number("logit_scale"), "use_qk_norm": model.has("blk.0.attn_q_norm.weight")}


def cohere2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Cohere's Command R7B and A."""
    return {"logit_scale": model.keys.number("logit_scale"), **per_layer_windows(model, config, 4)}


def olmo2(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """OLMo 2, and OLMo 3 if there are windows."""
    found = {"attention_bias": False, "head_dim": None}
    if not model.keys.integer("attention.sliding_window", 0, low=0):
        model.keys.ignore("attention.sliding_window_pattern")
        return found
    return {
        **found,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **per_layer_windows(model, config, 4),
    }


def exaone4(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """EXAONE 4."""
    return per_layer_windows(model, config, 4)


def granite(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Granite."""
    keys = model.keys
    keys.fixed("rope.scaling.finetuned", True)
    keys.ignore("expert_shared_feed_forward_length")
    return {
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        **attention_biases(model, config),
    }


def minicpm(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """MiniCPM, which Granite computes exactly: its attention has the usual scale."""
    keys = model.keys
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return {
        "attention_multiplier": config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 12.0),
        "residual_multiplier": keys.number("residual_scale", 1.4 / layers**0.5),
        "logits_scaling": keys.number("logit_scale", hidden / 256),
        **attention_biases(model, config),
    }


def baichuan(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """Baichuan of 7 billion parameters, which Llama computes. Raises ``gguf_unsupported`` for that of 13."""
    if config["num_hidden_layers"] != 32 or model.keys.number("attention.max_alibi_bias", 0.0):
        raise unsupported("a Baichuan of 13 billion parameters, whose positions use ALiBi")
    return {}


def smollm3(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """SmolLM3, in which every fourth layer has no rotary embedding."""
    return {"no_rope_layer_interval": 4, "use_sliding_window": False, **attention_biases(model, config)}


def glm(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    """GLM-4."""
    model.keys.fixed("rope.dimension_sections", [0, 0, 0, 0])
    biased = any(model.has(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))
    return {"attention_bias": biased, "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}


def _plain(model: GGUFModel, config: dict[str, Any]) -> Mapping[str, Any]:
    return {}


def _head_norm(stored: Stored) -> tuple[int, ...]:
    return stored.shape if len(stored.shape) == 2 else (stored.shape[0],)


_PARALLEL: Table = {"attn_norm": "input_layernorm", **PROJECTIONS, **MLP}

DENSE: dict[str, GGUFFamily] = {
    "qwen": GGUFFamily("Qwen2ForCausalLM", "qwen2", LLAMA, OUTER, qwen),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", LLAMA, OUTER, _plain),
    "qwen3": GGUFFamily(
        "Qwen3ForCausalLM", "qwen3", {**LLAMA, **HEAD_NORMS}, OUTER, lambda model, config: {"attention_bias": False}
    ),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", _GEMMA, _GEMMA_OUTER, gemma),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", _GEMMA2, _GEMMA_OUTER, gemma2),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_GEMMA2, "attn_q_norm": Shifted("self_attn.q_norm"), "attn_k_norm": Shifted("self_attn.k_norm")},
        _GEMMA_OUTER,
        gemma3,
    ),
    "phi2": GGUFFamily(
        "PhiForCausalLM",
        "phi",
        {
            **PROJECTIONS,
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {**OUTER, "output_norm": "model.final_layernorm"},
        phi2,
        epsilon="layer_norm_eps",
    ),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM",
        "phi3",
        {
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        OUTER,
        phi3,
    ),
    "starcoder2": GGUFFamily(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {**NORMS, **PROJECTIONS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        OUTER,
        starcoder2,
        epsilon="norm_epsilon",
    ),
    "command-r": GGUFFamily(
        "CohereForCausalLM",
        "cohere",
        {
            **_PARALLEL,
            "attn_q_norm": Reshaped("self_attn.q_norm", _head_norm, tuple),
            "attn_k_norm": Reshaped("self_attn.k_norm", _head_norm, tuple),
        },
        OUTER,
        cohere,
        epsilon="layer_norm_eps",
    ),
    "cohere2": GGUFFamily("Cohere2ForCausalLM", "cohere2", _PARALLEL, OUTER, cohere2, epsilon="layer_norm_eps"),
    "olmo2": GGUFFamily(
        "Olmo2ForCausalLM", "olmo2", {**PROJECTIONS, **MLP, **HEAD_NORMS, **OUTPUT_NORMS}, OUTER, olmo2
    ),
    "exaone": GGUFFamily("LlamaForCausalLM", "llama", LLAMA, OUTER, attention_biases),
    "exaone4": GGUFFamily(
        "Exaone4ForCausalLM", "exaone4", {**PROJECTIONS, **MLP, **HEAD_NORMS, **OUTPUT_NORMS}, OUTER, exaone4
    ),
    "minicpm": GGUFFamily("GraniteForCausalLM", "granite", LLAMA_PERMUTED, OUTER, minicpm),
    "baichuan": GGUFFamily("LlamaForCausalLM", "llama", LLAMA_PERMUTED, OUTER, baichuan),
    "internlm2": GGUFFamily("LlamaForCausalLM", "llama", LLAMA_PERMUTED, OUTER, attention_biases),
    "xverse": GGUFFamily("LlamaForCausalLM", "llama", LLAMA_PERMUTED, OUTER, attention_biases),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", "smollm3", LLAMA_PERMUTED, OUTER, smollm3),
    "glm4": GGUFFamily(
        "Glm4ForCausalLM",
        "glm4",
        {
            **PROJECTIONS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        OUTER,
        glm,
    ),
    "chatglm": GGUFFamily(
        "GlmForCausalLM",
        "glm",
        {**NORMS, **PROJECTIONS, "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        OUTER,
        glm,
    ),
}
