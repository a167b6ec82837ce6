"""Rotary scaling of a GGUF file, as ``rope_scaling`` of config.json.

Sources: llama.cpp's converter, which writes the parameters of linear scaling and YaRN as keys, and those of Llama 3 and
LongRoPE as one factor per frequency, in tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.gguf_model.keys import Metadata, shortest, unsupported

#: low_freq_factor, high_freq_factor and original_max_position_embeddings that models with Llama 3's scaling have.
_LLAMA3 = ((1.0, 4.0, 8192), (1.0, 4.0, 4096), (1.0, 1.0, 8192), (1.0, 4.0, 16384), (1.0, 4.0, 2048), (1.0, 4.0, 32))
Read = Callable[[str], Tensor]


def rope_scaling(keys: Metadata, shapes: Mapping[str, tuple[int, ...]], read: Read, context: int, dim: int) -> Any:
    """Return ``rope_scaling``, or None without scaling.

    shapes   of the tensors of the file.
    read     returns one of them.
    context  context length.
    dim      number of elements of a head that are rotated.

    Raises ``gguf_unsupported`` for scaling that config.json cannot express.
    """
    keys.ignore("rope.scaling.finetuned")
    keys.fixed("rope.scaling.yarn_ext_factor", 1.0)
    kind = keys.word("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", None) or keys.number("rope.scale_linear", None)
    original = keys.integer("rope.scaling.original_context_length", None, low=0)
    stretch = keys.number("rope.scaling.attn_factor", None)
    if "rope_factors_long.weight" in shapes:
        return _longrope(keys, read, original or context, stretch)
    if stretch not in (None, 1.0):
        raise unsupported(f"{keys.full('rope.scaling.attn_factor')} is {stretch}, without factors of LongRoPE")
    if "rope_freqs.weight" in shapes:
        return _frequency_factors(keys, read("rope_freqs.weight").float(), dim)
    if kind == "yarn":
        return _yarn(keys, factor, original)
    if kind not in ("none", "linear", "longrope"):
        raise unsupported(f"{keys.full('rope.scaling.type')} is {kind!r:.40}")
    return {"rope_type": "linear", "factor": factor} if factor not in (None, 0.0, 1.0) else None


def _yarn(keys: Metadata, factor: float | None, original: int | None) -> dict[str, Any]:
    if not factor or not original:
        raise keys.malformed(keys.full("rope.scaling.factor"), factor, "the factor of YaRN")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    values = {hf: keys.number(f"rope.scaling.{name}", None) for name, hf in names.items()}
    # The converter stores a tenth of DeepSeek's mscale_all_dim, and only for models whose mscale is equal.
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", None)
    if log_multiplier:
        values["mscale"] = values["mscale_all_dim"] = shortest(round(10 * log_multiplier, 6))
    return scaling | {name: value for name, value in values.items() if value is not None}


def _longrope(keys: Metadata, read: Read, original: int, stretch: float | None) -> dict[str, Any]:
    factors = {
        f"{kind}_factor": [shortest(value) for value in read(f"rope_factors_{kind}.weight").float().tolist()]
        for kind in ("short", "long")
    }
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    return scaling if stretch is None else scaling | {"attention_factor": stretch}


def _frequency_factors(keys: Metadata, factors: Tensor, dim: int) -> dict[str, Any] | None:
    """Return Llama 3's scaling if its parameters give exactly these factors, else LongRoPE with the factors."""
    base = keys.number("rope.freq_base", 10000.0)
    if factors.dim() != 1 or len(factors) != dim // 2 or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise unsupported(f"rope_freqs.weight has the shape {list(factors.shape)}, not {dim // 2} positive factors")
    if bool((factors == 1).all()):
        return None
    largest = shortest(float(factors.max()))
    for low, high, original in _LLAMA3:
        expected = llama3_factors(base, dim, largest, low, high, original)
        if torch.allclose(expected, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    plain = [shortest(value) for value in factors.tolist()]
    return {
        "rope_type": "longrope",
        "short_factor": plain,
        "long_factor": plain,
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.integer("context_length"),
    }


def llama3_factors(base: float, dim: int, factor: float, low: float, high: float, original: int) -> Tensor:
    """Return by what Llama 3's scaling divides each frequency [dim / 2]."""
    lengths = 2 * math.pi * base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if high == low:
        blend = (original / lengths > high).double()
    else:
        blend = ((original / lengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 / ((1 - blend) / factor + blend)).float()
