"""The keys of config.json that the native families compute with, and the values of a file without them.

They are those of transformers' config classes, which leave default values out of files. A test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Sizes that have no default here, although transformers' classes have some: without them a file is damaged.
REQUIRED = frozenset(
    {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_heads"),
        *("n_embd", "n_layer", "n_head", "d_model", "n_heads", "n_layers"),
    }
)


@dataclass(frozen=True)
class Family:
    """The keys of one model_type.

    defaults  key -> its value in a file without it; None for a value that follows from others. Their types are those
              that values must have.
    aliases   other spellings that transformers' class maps to a key.
    fixed     key -> the only values that are supported, besides null.
    unread    keys of transformers' class that its model does not compute with.
    rotary    whether positions are rotary: rope_parameters and its older spellings are keys.
    theta     base of the rotary frequencies in a file without one.
    rotated   the part of each head that is rotated in a file without ``partial_rotary_factor``; None: all of it.
    rope_keys keys of rope_parameters that only this family has.
    kinds     kinds of layers besides full attention.
    period    every so manieth layer has full attention and the others a window, unless the file says otherwise.
    by_layer  keys whose value may be a list with one for each layer.
    """

    defaults: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    rotary: bool = True
    theta: float = 10000.0
    rotated: float | None = None
    rope_keys: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset({"sliding_attention"})
    period: int | None = None
    by_layer: frozenset[str] = frozenset()


LLAMA: dict[str, object] = {
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ATTENTION_BIAS: dict[str, Any] = {"attention_bias": False}
#: The kinds of layers of families whose other layers have a state.
RECURRENT = frozenset({"linear_attention"})
#: Keys of the object with the sizes of Kimi Linear's delta rule, and the numbers of its layers, counted from 1.
KIMI_LINEAR_ATTENTION = frozenset({"num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"})
WINDOW: dict[str, Any] = {"sliding_window": 4096, "layer_types": None}
#: Qwen's windows, which are off unless use_sliding_window is on.
QWEN_WINDOW: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "layer_types": None,
    "max_window_layers": 28,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def llama_keys(without: tuple[str, ...] = (), **others: object) -> dict[str, object]:
    """Return Llama's keys with others."""
    return {name: value for name, value in LLAMA.items() if name not in without} | others
