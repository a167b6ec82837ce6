"""GGUFFamily: what an architecture of llama.cpp is in Hugging Face checkpoints, and the settings that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aiakq.formats.gguf_model.keys import Metadata, unsupported
from aiakq.formats.gguf_model.rope import rope_scaling
from aiakq.formats.gguf_model.rules import TensorRule

Shapes = Mapping[str, tuple[int, ...]]
#: Module of the file -> rule, or name of a module that is stored as it is.
Table = Mapping[str, TensorRule | str]
#: Maximum number of layers, as for config.json.
_MAX_LAYERS = 10_000
EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
}


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file's metadata and the headers of its tensors.

    shapes  name -> shape, as torch orders the dimensions: [N, K].
    read    returns a tensor of the file as floats; used for small ones only.
    """

    keys: Metadata
    shapes: Shapes
    read: Callable[[str], Tensor]

    def has(self, name: str) -> bool:
        """Whether the file has the tensor ``name``."""
        return name in self.shapes


@dataclass(frozen=True)
class GGUFFamily:
    """An architecture of llama.cpp.

    architecture  in config.json.
    block         tables of the tensors of a layer, without ``blk.N.``.
    outer         and of the others.
    settings      values of config.json besides those that all families have, which it may change or leave out: it gets
                  them, and returns what to add. None leaves a value out.
    layers        prefix of the names of a layer in the checkpoint.
    epsilon       name of the epsilon of norms.
    sizes         names of the sizes, where they are not Llama's.
    rotary        whether it has rotary embedding.
    latent        whether keys and values are latents, so that a part of each head of its own is rotated.
    """

    architecture: str
    model_type: str
    block: Table
    outer: Table = field(default_factory=dict)
    settings: Callable[[GGUFModel, dict[str, Any]], Mapping[str, Any]] = lambda model, config: {}
    layers: str = "model.layers.{layer}."
    epsilon: str = "rms_norm_eps"
    sizes: Mapping[str, str] = field(default_factory=dict)
    rotary: bool = True
    latent: bool = False


def common_config(family: GGUFFamily, model: GGUFModel) -> dict[str, Any]:
    """Return the values of config.json that all families have. Raises ``model_malformed``."""
    keys = model.keys
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(model),
        "hidden_size": hidden,
        "num_hidden_layers": _layers(model),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "intermediate_size": keys.integer("feed_forward_length", None, low=0),
        "max_position_embeddings": keys.integer("context_length"),
        family.epsilon: keys.number(EPSILONS[family.epsilon]),
        "tie_word_embeddings": not model.has("output.weight"),
    }
    keys.ignore(*EPSILONS.values(), "attention.key_length", "attention.value_length", "rope.dimension_count")
    keys.ignore("expert_count", "expert_used_count")  # read again by families with experts
    keys.fixed("attention.causal", True)
    _check_experts(family, model)
    if family.rotary:
        config |= _rotary(family, model, config)
    return config


def _layers(model: GGUFModel) -> int:
    """Return the number of layers, without those that predict further tokens."""
    keys = model.keys
    count: int = keys.integer("block_count")
    if count > _MAX_LAYERS:  # lists have an entry for each
        raise keys.malformed(keys.full("block_count"), count, f"at most {_MAX_LAYERS}")
    further: int = keys.integer("nextn_predict_layers", 0, low=0)
    return count - further


def _vocab_size(model: GGUFModel) -> int:
    shape = model.shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise model.keys.malformed("token_embd.weight", shape, "a matrix")
    model.keys.ignore("vocab_size")  # of the original; converters may store fewer rows
    return shape[0]


def _check_experts(family: GGUFFamily, model: GGUFModel) -> None:
    """Raise ``gguf_unsupported`` for experts in a family whose tables have none."""
    count = model.keys.integer("expert_count", 0, low=0)
    named = any("exp" in name or "gate_inp" in name for name in family.block)
    if count and not named:
        raise unsupported(
            f"{model.keys.full('expert_count')} is {count}, and {family.model_type} models have no experts"
        )


def _rotary(family: GGUFFamily, model: GGUFModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, and the size of heads."""
    keys = model.keys
    head_dim = keys.integer("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if family.latent:
        head_dim = keys.integer("rope.dimension_count")
    elif keys.integer("attention.value_length", head_dim) != head_dim:
        raise unsupported(f"{keys.full('attention.value_length')} differs from {keys.full('attention.key_length')}")
    if head_dim < 1:
        heads = config["num_attention_heads"]
        raise keys.malformed(keys.full("attention.head_count"), heads, f"at most {config['hidden_size']}, the width")
    dim = keys.integer("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"head_dim": head_dim, "rope_theta": keys.number("rope.freq_base", 10000.0)}
    if dim != head_dim:
        part = next(
            (
                value
                for value in (round(dim / head_dim, digits) for digits in (2, 3, 6))
                if int(head_dim * value) == dim
            ),
            None,
        )
        if part is None or dim > head_dim:
            raise keys.malformed(keys.full("rope.dimension_count"), dim, f"a part of {head_dim} elements")
        found["partial_rotary_factor"] = part
    scaling = rope_scaling(keys, model.shapes, model.read, config["max_position_embeddings"], dim)
    return found if scaling is None else found | {"rope_scaling": scaling}


def per_layer_windows(model: GGUFModel, config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Return sliding_window and layer_types: windows except in every ``period``-th layer, unless the file says more.

    Raises ``gguf_unsupported`` for a rotary base that the layers with windows do not share.
    """
    keys, layers = model.keys, config["num_hidden_layers"]
    if "rope_local_base_freq" not in config:
        keys.fixed("rope.freq_base_swa", config["rope_theta"])
    window = keys.integer("attention.sliding_window", None, low=0)
    if isinstance(keys.values.get(keys.full("attention.sliding_window_pattern")), list):
        windowed = [bool(each) for each in keys.each_layer("attention.sliding_window_pattern", layers) or []]
    else:
        period = keys.integer("attention.sliding_window_pattern", period)
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": kinds}
