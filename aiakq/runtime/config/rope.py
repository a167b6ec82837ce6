"""Rotary parameters of a config.json, normalized to the keys of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiakq.errors import error

#: Aliases of scaling types.
_RENAMED = {"su": "longrope"}
#: Default rotary bases of families for which it is not 10000.
_BASES = {
    "cohere": 5e5, "gemma3_text": 1e6, "gpt_oss": 1.5e5, "lfm2": 1e6, "llama4_text": 5e5, "mixtral": 1e6, "olmo3": 5e5,
    "phimoe": 1e6, "smollm3": 2e6,
}  # fmt: skip
#: Scaling types that depend on the number of positions a model was trained for.
_FROM_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta, rope_type and the parameters of that type; or these by kind of layer, if layers differ.

    They are read from rope_parameters (transformers 5), or from rope_theta, rope_scaling and other keys of older files.
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
    # Gemma 3 and OLMo 3 apply scaling only to layers without a sliding window.
    plain = {} if local is None else {"rope_theta": local}
    return {"full_attention": _complete(raw, scaling), "sliding_attention": _complete(raw, plain)}


def is_nested(rope: Mapping[str, Any]) -> bool:
    """Whether the parameters are given per kind of layer."""
    return any(isinstance(value, Mapping) for value in rope.values())


def longest_context(rope: Mapping[str, Any], trained: int) -> int:
    """Return the context length of a model, which YaRN extends beyond the ``trained`` length by its factor."""
    parts = rope.values() if is_nested(rope) else [rope]
    stretched = [
        int(part["original_max_position_embeddings"] * part["factor"])
        for part in parts
        if part.get("rope_type") == "yarn" and part.get("original_max_position_embeddings") and part.get("factor")
    ]
    return max([trained, *stretched])


def _complete(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete one set of parameters with values from other keys of the config."""
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
