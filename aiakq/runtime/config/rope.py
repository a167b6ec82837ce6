"""Rotary parameters of a config.json, in the spelling of transformers 5, whatever spelling the file has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiakq.errors import error

#: Other names of a scaling.
_RENAMED = {"su": "longrope"}
#: Rotary bases of families where it is not 10000 unless config.json says otherwise.
_BASES = {
    "cohere": 5e5, "gemma3_text": 1e6, "gpt_oss": 1.5e5, "lfm2": 1e6, "llama4_text": 5e5, "mixtral": 1e6, "olmo3": 5e5,
    "phimoe": 1e6, "smollm3": 2e6,
}  # fmt: skip
#: Scalings that need to know for how many positions a model was trained.
_FROM_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_type and the parameters of that type; or kind of layer -> these, where kinds of layers differ.

    From transformers 5's rope_parameters, or from rope_theta, rope_scaling and what older files have beside them.
    """
    given = raw.get("rope_parameters")
    if given:
        if is_nested(given):
            return {kind: _complete(raw, part or {}) for kind, part in given.items() if isinstance(part, dict)}
        return _complete(raw, given)
    scaling = raw.get("rope_scaling") or {}
    family = raw.get("model_type")
    local = raw.get("rope_local_base_freq", 10000.0 if family == "gemma3_text" else None)
    kinds = family == "olmo3" and scaling
    if local is None and not kinds:
        return _complete(raw, scaling)
    # Gemma 3 and OLMo 3 scale the layers without a window only.
    plain = {} if local is None else {"rope_theta": local}
    return {"full_attention": _complete(raw, scaling), "sliding_attention": _complete(raw, plain)}


def is_nested(rope: Mapping[str, Any]) -> bool:
    """Whether parameters are given for each kind of layer."""
    return any(isinstance(value, Mapping) for value in rope.values())


def longest_context(rope: Mapping[str, Any], trained: int) -> int:
    """Positions a model is meant for: YaRN stretches what it was trained for by its factor, others say what they do."""
    parts = rope.values() if is_nested(rope) else [rope]
    stretched = [
        int(part["original_max_position_embeddings"] * part["factor"])
        for part in parts
        if part.get("rope_type") == "yarn" and part.get("original_max_position_embeddings") and part.get("factor")
    ]
    return max([trained, *stretched])


def _complete(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """One set of parameters with what the file says elsewhere."""
    rope = dict(given)
    kind = str(rope.pop("type", "default"))
    rope.setdefault("rope_type", kind)
    if raw.get("model_type") == "phi3" and rope["rope_type"] == "yarn":
        rope["rope_type"] = "longrope"
    rope["rope_type"] = _RENAMED.get(rope["rope_type"], rope["rope_type"])
    base = _BASES.get(str(raw.get("model_type")), 10000.0)
    rope.setdefault("rope_theta", raw.get("rope_theta", raw.get("rotary_emb_base")) or base)
    if not 0 < rope["rope_theta"] < math.inf:
        raise error("model_malformed", file="config.json", reason=f"rope_theta is {rope['rope_theta']!r:.64}")
    part = raw.get("partial_rotary_factor", raw.get("rotary_pct"))
    if part is not None:
        rope.setdefault("partial_rotary_factor", part)
    original = raw.get("original_max_position_embeddings")
    if original is not None and rope["rope_type"] in _FROM_ORIGINAL:
        rope["original_max_position_embeddings"] = original
    return rope
