"""The keys of Gemma 3n, whose tokens have several hidden states, and whose layers have MLPs of different widths; see
family_keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiakq.constraints import Constraint
from aiakq.errors import error
from aiakq.formats.config_values import SIZE, malformed, read_value
from aiakq.runtime.config.family_keys import ATTENTION_BIAS, WINDOW, Family, llama_keys

#: Which share of the activations of a layer is zero.
_SPARSITY = Constraint(type=float, low=0, high=math.nextafter(1, 0), expected="a number from 0 to below 1")
#: In a file without ``activation_sparsity_pattern``, the first layers of a model with more of them are sparse.
_SPARSE_LAYERS, _USUAL_SPARSITY = 10, 0.95

#: Modules that embed tokens which stand for parts of images and sounds -> keys of their part of config.json, and the
#: values of one without.
_EMBEDDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "embed_vision": (
        "vision_config",
        {"vocab_offset": 262144, "vocab_size": 128, "hidden_size": 2048, "rms_norm_eps": 1e-6},
    ),
    "embed_audio": (
        "audio_config",
        {"vocab_offset": 262272, "vocab_size": 128, "hidden_size": 1536, "rms_norm_eps": 1e-6},
    ),
}

GEMMA3N = Family(
    llama_keys(
        ("hidden_act",),
        intermediate_size=16384,
        num_key_value_heads=2,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        final_logit_softcapping=30.0,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        altup_active_idx=0,
        altup_correct_scale=True,
        altup_num_inputs=4,
        num_kv_shared_layers=15,
        laurel_rank=64,
        activation_sparsity_pattern=None,
        rope_local_base_freq=None,
        media_embedders=None,  # from the model around it
        **ATTENTION_BIAS,
        **{**WINDOW, "sliding_window": 512},
    ),
    # Coefficients are clipped in training only, and scores are not scaled: both keys are in published files.
    unread=frozenset({"hidden_act", "altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"}),
    theta=1e6,
    period=5,
    by_layer=frozenset({"intermediate_size"}),
)


def media_embedders(outer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the modules of the model with this config.json, in order, that embed tokens from ``vocab_offset`` on."""
    stated = {name: outer.get(key) or {} for name, (key, _) in _EMBEDDERS.items()}
    return {
        name: {key: stated[name].get(key, default) for key, default in defaults.items()}
        for name, (_, defaults) in _EMBEDDERS.items()
    }


def gemma3n_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the width of the MLP and the share of zeros in it of every layer, as lists.

    Raises ``model_malformed``.
    """
    layers = int(read_value(raw, SIZE, "num_hidden_layers"))
    widths, shares = raw["intermediate_size"], raw.get("activation_sparsity_pattern")
    if not isinstance(widths, list):
        widths = [widths] * layers
    if shares is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        shares = [_USUAL_SPARSITY] * sparse + [0.0] * (layers - sparse)
    for key, values in (("intermediate_size", widths), ("activation_sparsity_pattern", shares)):
        if not isinstance(values, list) or len(values) != layers:
            raise malformed(key, values, f"a list of {layers} numbers")
    shares = [
        read_value({"activation_sparsity_pattern": each}, _SPARSITY, "activation_sparsity_pattern") for each in shares
    ]
    active, streams = raw["altup_active_idx"], int(read_value(raw, SIZE, "altup_num_inputs"))
    if active >= streams:
        reason = f"altup_active_idx is {active}, but a token has {streams} hidden states (altup_num_inputs)"
        raise error("model_malformed", file="config.json", reason=reason)
    return {**raw, "intermediate_size": widths, "activation_sparsity_pattern": shares}
