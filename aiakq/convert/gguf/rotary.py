"""Rotary parameters of a model as keys and tensors of a GGUF file, the inverse of formats/gguf_model/rope.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.gguf_model.rope import llama3_factors
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import is_nested

#: Parameters of YaRN -> keys.
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
#: Parameters that all programs use if they are not given.
_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
#: Parameters that other ones, which are compared, decide.
_DERIVED = {"longrope": ("factor",)}


def full_rope(model: ModelConfig) -> Mapping[str, Any]:
    """Return the rotary parameters, of layers with full attention if kinds of layers differ."""
    return model.rope["full_attention"] if is_nested(model.rope) else model.rope


def rope_keys(model: ModelConfig, width: int) -> dict[str, object]:
    """Return the keys of a model that rotates heads of ``width`` elements, or a part of each."""
    rope = full_rope(model)
    keys: dict[str, object] = {
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if is_nested(model.rope):
        keys["rope.freq_base_swa"] = float(model.rope["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or model.max_position
        keys["rope.scaling.original_context_length"] = int(original)
        keys |= {f"rope.scaling.{key}": float(rope[name]) for name, key in _YARN.items() if rope.get(name) is not None}
        if rope.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * float(rope["mscale_all_dim"])
    if kind == "longrope":
        keys["rope.scaling.type"] = kind  # with any other, llama.cpp reads no factors but those of Phi-3
        keys["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        keys["rope.scaling.attn_factor"] = _stretch(rope, model.max_position)
    return keys


def rope_tensors(model: ModelConfig, width: int) -> dict[str, Tensor]:
    """Return the tensors of factors of a file [width / 2] float32, by name."""
    rope = full_rope(model)
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        return {
            f"rope_factors_{part}.weight": torch.tensor(rope[f"{part}_factor"], dtype=torch.float32)
            for part in ("long", "short")
        }
    if kind != "llama3":
        return {}
    dim = int(width * rope.get("partial_rotary_factor", 1.0))
    original = rope.get("original_max_position_embeddings") or model.max_position
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factors = llama3_factors(float(rope["rope_theta"]), dim, float(rope["factor"]), low, high, int(original))
    return {"rope_freqs.weight": factors}


def _stretch(rope: Mapping[str, Any], context: int) -> float:
    """Return the factor of LongRoPE's attention, which follows from the lengths if it is not given (LongRoPE, 3.2)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = rope["original_max_position_embeddings"]
    scale = rope.get("factor") or context / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def effective_rope(rope: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return rotary parameters in a form in which equal ones are computed with alike."""
    if is_nested(rope):
        return {kind: effective_rope(part, model) for kind, part in rope.items()}
    kind = rope.get("rope_type", "default")
    found = _DEFAULTS | {name: value for name, value in rope.items() if value is not None}
    if kind == "longrope":
        found["attention_factor"] = _stretch(rope, model.max_position)
    elif kind != "default":
        found.setdefault("original_max_position_embeddings", model.max_position)
    return {name: value for name, value in found.items() if name not in _DERIVED.get(kind, ())}
