"""Encoders as their authors publish them, with Python code of their own: their keys, in the spelling of transformers.

The tensors have the names that transformers writes, too, so only config.json differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.errors import error

_NOMIC_NAMES = {
    **{"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    **{"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
    **{"layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta"},
}
#: Keys of NomicBERT's authors -> the only values that transformers' class computes.
_NOMIC: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("swiglu",),
    "rotary_emb_fraction": (1,),
    "scale_attn_weights": (True,),
    **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), ()),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved", "causal"), (False,)),
    **dict.fromkeys(("prenorm", "parallel_block", "parallel_block_tied_norm", "use_rms_norm"), (False,)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx",), (False,)),
}
_NOMIC_UNREAD = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln"),
    *("max_trained_positions", "pad_vocab_size_multiple", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
#: The same of GTE.
_GTE: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "pack_qkv": (True,),
    "logn_attention_scale": (False,),
}
_GTE_UNREAD = ("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")


def published_nomic(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of NomicBERT's authors (nomic-embed-text-v1 and v1.5) with transformers' keys.

    Raises ``config_key_unsupported``.
    """
    config = _checked(config, _NOMIC, _NOMIC_UNREAD)
    for alias, name in _NOMIC_NAMES.items():
        if (value := config.pop(alias, None)) is not None:
            config[name] = value
    config.setdefault("intermediate_size", 4 * config["hidden_size"])
    # The frequencies of longer texts than those of the training are the same.
    config.setdefault("rope_theta", 10_000.0)
    return {**config, "hidden_act": "silu"}


def published_gte(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of GTE's authors (``NewModel``) with transformers' keys.

    Their scaling of rotary frequencies, ntk, multiplies the base by its factor, and divides all frequencies by
    factor ** (2 / D) for heads of D elements, which is a linear scaling. Raises ``config_key_unsupported``.
    """
    config = _checked(config, _GTE, _GTE_UNREAD)
    theta, scaling = float(config.get("rope_theta") or 10_000.0), config.pop("rope_scaling", None)
    if isinstance(scaling, Mapping):
        scaling = {name: value for name, value in scaling.items() if value is not None}
    if scaling is not None:
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        is_number = isinstance(factor, int | float) and factor > 1
        if not is_number or scaling != {"type": "ntk", "factor": factor}:
            raise _refused("rope_scaling", scaling)
        assert isinstance(factor, int | float)
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        theta *= factor
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor ** (2 / head_dim), "rope_theta": theta}
    return {**config, "rope_theta": theta}


def _checked(
    config: Mapping[str, Any], fixed: Mapping[str, tuple[object, ...]], unread: tuple[str, ...]
) -> dict[str, Any]:
    """Return the config without keys that have one value only or no effect. Raises ``config_key_unsupported``."""
    for key, allowed in fixed.items():
        if config.get(key) not in (None, *allowed):
            raise _refused(key, config[key])
    return {key: value for key, value in config.items() if key not in fixed and key not in unread}


def _refused(key: str, value: object) -> Exception:
    reason = "the code of its authors computes something else then, which aiakq does not"
    return error("config_key_unsupported", key=key, value=f"{value!r:.64}", reason=reason)
