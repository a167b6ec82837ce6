"""Rotary parameters of a config.json, normalized to the keys of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import SIZE, malformed, read_value
from aiakq.runtime.config.families import FAMILIES
from aiakq.runtime.config.family_keys import Family

#: What holds for models without a native family.
_UNKNOWN = Family({})
#: Aliases of scaling types.
_RENAMED = {"su": "longrope"}
#: Scaling of a family whose config.json has none.
_SCALINGS: Mapping[str, Mapping[str, object]] = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    },
}
#: Rotary parameters by kind of layer of a family whose config.json has none.
_KINDS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "gemma4_text": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "mimo_v2_flash": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
    "lfm3": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
#: Parameters that a scaling type cannot do without.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
#: Scaling types of the families whose class in transformers refuses others.
_TYPES = dict.fromkeys(("phi3", "phimoe"), ("default", "longrope"))
#: Families whose layers may have rotary parameters by kind.
_BY_KIND = ("gemma3_text", "gemma3n_text", "gemma4_text", "olmo3", "lfm3", "mimo_v2_flash")
#: Families whose layers with a window have a base of their own -> that of files without one.
_LOCAL_BASES = {"gemma3_text": 10000.0, "gemma3n_text": 10000.0}
#: Native families whose frequencies may be proportional.
_PROPORTIONAL = ("gemma4_text", "lfm3")
#: Older keys beside rope_parameters, and what they are called there.
_OLDER_KEYS = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rope_local_base_freq": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
#: Scaling types that depend on the number of positions a model was trained for.
_FROM_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})


@dataclass(frozen=True)
class GridRope:
    """Rotary embedding of tokens of images by three positions (M-RoPE): time, row and column.

    rows        of the tables, which tokens of images write for themselves: as many as a step has tokens.
    sizes       number of frequencies that depend on each position, where config.json has no mrope_section.
    alternates  whether these alternate instead of following each other.
    """

    rows: int
    sizes: tuple[int, int, int]
    alternates: bool


def rope_parameters(raw: Mapping[str, object]) -> dict[str, object]:
    """Return rope_theta, rope_type and the parameters of that type; or these by kind of layer, if layers differ.

    They are read from rope_parameters (transformers 5), or from rope_theta, rope_scaling and other keys of older files.
    Raises ``config_key_unsupported`` if both are there and mean different things: programs differ in which they use.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key) is not None and not isinstance(raw[key], Mapping):
            raise _malformed(f"{key} is {raw[key]!r:.64}, not an object")
    older = {key: value for key, value in raw.items() if key != "rope_parameters"}
    if not raw.get("rope_parameters"):
        return _parameters(older)
    newer = _parameters({key: value for key, value in raw.items() if key != "rope_scaling"})
    if raw.get("rope_scaling") and _parameters(older) != newer:
        reason = (
            "rope_parameters says otherwise, and transformers leaves out its values, rope_theta too; keep one of them"
        )
        raise error("config_key_unsupported", key="rope_scaling", value=f"{raw['rope_scaling']!r:.64}", reason=reason)
    _check_older_keys(raw)
    return newer


def _check_older_keys(raw: Mapping[str, Any]) -> None:
    """Raise ``config_key_unsupported`` for a key beside rope_parameters whose value no part of these has."""
    given = raw["rope_parameters"]
    parts = [part or {} for part in given.values()] if is_nested(given) else [given]
    for key, name in _OLDER_KEYS.items():
        older, newer = raw.get(key), [part.get(name) for part in parts if isinstance(part, Mapping)]
        if older is not None and None not in newer and older not in newer:
            reason = f"rope_parameters says otherwise ({name}: {newer[0]!r:.64}), and programs differ in which they use"
            raise error("config_key_unsupported", key=key, value=f"{older!r:.64}", reason=f"{reason}; keep one of them")


def _parameters(raw: Mapping[str, Any]) -> dict[str, object]:
    """Return the parameters of a config that has rope_parameters or the older keys."""
    by_kind = _KINDS.get(str(raw.get("model_type")))
    given = raw.get("rope_parameters") or (by_kind and (raw.get("rope_scaling") or by_kind))
    if given:
        if is_nested(given):
            if raw.get("model_type") in FAMILIES and raw.get("model_type") not in _BY_KIND:
                reason = "layers of this family have the same rotary parameters"
                raise error("config_key_unsupported", key="rope_parameters", value=f"{given!r:.64}", reason=reason)
            parts = {kind: part or {} for kind, part in given.items() if isinstance(part, dict)}
            base = _LOCAL_BASES.get(str(raw.get("model_type")))
            if base is not None and "sliding_attention" in parts:
                local = raw.get("rope_local_base_freq", base)
                parts["sliding_attention"] = {"rope_theta": local, **parts["sliding_attention"]}
            return {kind: _complete(raw, part) for kind, part in parts.items()}
        if by_kind:
            raise _malformed("rope_parameters are not given by kind of layer")
        return _complete(raw, given)
    family = raw.get("model_type")
    scaling = raw.get("rope_scaling") or _SCALINGS.get(str(family), {})
    local = raw.get("rope_local_base_freq", _LOCAL_BASES.get(str(family)))
    kinds = family == "olmo3" and scaling
    if local is None and not kinds:
        return _complete(raw, scaling)
    # Gemma 3 and OLMo 3 apply scaling only to layers without a sliding window.
    plain = {} if local is None else {"rope_theta": local}
    return {"full_attention": _complete(raw, scaling), "sliding_attention": _complete(raw, plain)}


def is_rotary(raw: Mapping[str, Any]) -> bool:
    """Whether any layer has rotary embedding, which models without a native family are taken to have."""
    kind = raw.get("model_type")
    if kind == "falcon":
        return not raw.get("alibi")
    if kind == "granitemoehybrid":
        return raw.get("position_embedding_type") == "rope"
    if kind == "olmo_hybrid":  # files turn it off with a null rope_theta, not by leaving it out
        parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        return parameters.get("rope_theta", raw.get("rope_theta", 0.0)) is not None
    return FAMILIES.get(str(kind), _UNKNOWN).rotary


def differs_by_kind(raw: Mapping[str, Any]) -> bool:
    """Whether kinds of layers have rotary parameters of their own, which no key beside them could change."""
    given = raw.get("rope_parameters")
    return is_nested(given) if given else raw.get("model_type") in _KINDS


def rotated_layers(raw: Mapping[str, Any], layers: int) -> list[bool]:
    """Return which layers have rotary embedding in families where some have none (SmolLM3, Llama 4).

    Raises ``model_malformed``.
    """
    named = raw.get("no_rope_layers")
    if named or (named == [] and raw.get("model_type") != "llama4_text"):  # 1 for rotary embedding, despite the name
        if len(named) < layers:
            reason = f"no_rope_layers has {len(named)} entries, but the model has {layers} layers"
            raise error("model_malformed", file="config.json", reason=reason)
        return [bool(each) for each in named[:layers]]
    every = read_value(raw, SIZE, "no_rope_layer_interval", default=4)
    return [(layer + 1) % every != 0 for layer in range(layers)]


def is_nested(rope: Mapping[str, object]) -> bool:
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


def check_even(raw: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> None:
    """Raise ``model_malformed`` if whole heads of an odd size are rotated, which is done in pairs of elements."""
    family = FAMILIES.get(str(raw.get("model_type")))
    parts = rope.values() if is_nested(rope) else [rope]
    is_whole = any(
        part.get("rope_type") == "proportional" or int(head_dim * part.get("partial_rotary_factor", 1.0)) == head_dim
        for part in parts
    )
    if family is not None and family.rotary and is_whole and head_dim % 2:
        raise malformed("head_dim", head_dim)


def _complete(raw: Mapping[str, object], given: Mapping[str, Any]) -> dict[str, object]:
    """Complete one set of parameters with values from other keys of the config."""
    rope = dict(given)
    kind = str(rope.pop("type", "default"))
    rope.setdefault("rope_type", kind)
    if raw.get("model_type") == "phi3" and rope["rope_type"] == "yarn":
        rope["rope_type"] = "longrope"
    rope["rope_type"] = _RENAMED.get(rope["rope_type"], rope["rope_type"])
    family = FAMILIES.get(str(raw.get("model_type")), _UNKNOWN)
    bases = (rope.get("rope_theta"), raw.get("rope_theta"), raw.get("rotary_emb_base"), family.theta)
    rope["rope_theta"] = next(each for each in bases if each is not None)
    if not 0 < rope["rope_theta"] < math.inf:
        raise _malformed(f"rope_theta is {rope['rope_theta']!r:.64}")
    part = raw.get("partial_rotary_factor", raw.get("rotary_pct"))
    if part is None or raw.get("model_type") == "bamba":  # whose class has it fixed
        part = family.rotated
    if part is not None:
        rope.setdefault("partial_rotary_factor", part)
    original = raw.get("original_max_position_embeddings")
    if original is not None and rope["rope_type"] in _FROM_ORIGINAL:
        rope["original_max_position_embeddings"] = original
    _check(str(raw.get("model_type")), rope)
    return rope


def _check(family: str, rope: Mapping[str, Any]) -> None:
    """Raise ``config_key_unsupported`` or ``model_malformed`` for parameters with which transformers does not compute,
    or of which it only warns.
    """
    kind = rope["rope_type"]
    if kind not in _TYPES.get(family, (kind,)):
        reason = f"transformers' {family} models have {' and '.join(_TYPES[family])} only"
        raise error("config_key_unsupported", key="rope_type", value=f"{kind!r:.64}", reason=reason)
    if kind == "proportional" and family in FAMILIES and family not in _PROPORTIONAL:
        reason = f"aiakq's {family} models do not compute with it"
        raise error("config_key_unsupported", key="rope_type", value=f"{kind!r:.64}", reason=reason)
    needed = () if kind == "dynamic" and rope.get("alpha") else _NEEDED.get(kind, ())  # Hunyuan's has no factor
    if family == "phimoe" and kind == "longrope":
        needed += ("short_mscale", "long_mscale")
    for name in needed:
        if rope.get(name) is None:
            raise _malformed(f"rope_type {kind} has no {name}")
    numbers = {name: value for name, value in rope.items() if isinstance(value, int | float)}
    for name in ("factor", "alpha"):
        if numbers.get(name, 1) <= 0:
            raise _malformed(f"the {name} of rope_type {kind} is {rope[name]!r:.64}")
    if not 0 < numbers.get("partial_rotary_factor", 1) <= 1:
        raise _malformed(f"partial_rotary_factor is {rope['partial_rotary_factor']!r:.64}")
    if numbers.get("original_max_position_embeddings", 1) <= 0:
        value = rope["original_max_position_embeddings"]
        raise _malformed(f"original_max_position_embeddings is {value!r:.64}")
    low, high = numbers.get("low_freq_factor", 1), numbers.get("high_freq_factor", 4)
    if kind == "llama3" and low >= high:
        raise _malformed(f"low_freq_factor is {low!r:.64}, not below high_freq_factor, {high!r:.64}")
    slow, fast = numbers.get("beta_slow", 1) or 1, numbers.get("beta_fast", 32) or 32
    if kind == "yarn" and fast < slow:
        raise _malformed(f"beta_fast is {fast!r:.64}, below beta_slow, {slow!r:.64}")


def _malformed(reason: str) -> AiakqError:
    return error("model_malformed", file="config.json", reason=reason)
