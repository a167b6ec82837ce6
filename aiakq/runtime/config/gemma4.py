"""The keys of Gemma 4, whose layers with full attention have other heads, and whose last layers may share keys and
values; see family_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.errors import error
from aiakq.formats.config_values import COUNT, SIZE, malformed, read_value
from aiakq.runtime.config.family_keys import ATTENTION_BIAS, WINDOW, Family, llama_keys

#: Size of the heads with full attention in a file that has neither ``per_layer_config`` nor ``global_head_dim``.
_GLOBAL_HEAD_DIM = 512
#: Every so manieth layer has full attention in a file without ``layer_types``.
_PERIOD = 6
#: Families whose last layers may have no keys and values of their own.
_SHARE_KEYS = ("gemma3n_text", "gemma4_text")
#: Sizes that ``per_layer_config`` may state for a layer.
_OF_LAYER = frozenset({"head_dim", "num_key_value_heads"})

GEMMA4 = Family(
    llama_keys(
        ("hidden_act",),
        intermediate_size=9216,
        num_key_value_heads=4,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        final_logit_softcapping=None,
        use_bidirectional_attention=None,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        num_experts=None,
        top_k_experts=None,
        moe_intermediate_size=None,
        global_head_dim=None,
        num_global_key_value_heads=None,
        per_layer_config=None,
        **ATTENTION_BIAS,
        **{**WINDOW, "sliding_window": 512},
    ),
    # Images attend to each other in both directions with "vision"; text does not.
    fixed={"use_bidirectional_attention": ("vision",)},
    unread=frozenset({"hidden_act", "cache_implementation"}),
    period=_PERIOD,
)


def gemma4_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the kinds of all layers, of which the last always has full attention, and the sizes of those
    whose heads are others, by number.

    Raises ``model_malformed``, and ``config_key_unsupported`` for other sizes than those of heads.
    """
    layers, kinds = int(read_value(raw, SIZE, "num_hidden_layers")), raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if (layer + 1) % _PERIOD else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise malformed("layer_types", kinds, f"a list of {layers} names")
    kinds = [*kinds[:-1], "full_attention"]
    sizes = raw.get("per_layer_config")
    if sizes is None:
        sizes = {layer: _global_sizes(raw) for layer, kind in enumerate(kinds) if kind == "full_attention"}
    return {**raw, "layer_types": kinds, "per_layer_config": _by_number(raw, sizes, kinds)}


def _global_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of layers with full attention in files of other versions than transformers 5.23."""
    sizes = {"head_dim": int(read_value(raw, SIZE, "global_head_dim", default=_GLOBAL_HEAD_DIM))}
    if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = int(read_value(raw, SIZE, "num_global_key_value_heads"))
    return sizes


def _by_number(raw: Mapping[str, Any], stated: Mapping[Any, Any], kinds: list[str]) -> dict[int, dict[str, int]]:
    """Return the sizes ``stated`` of heads of layers by number. Layers of a kind have the same ones."""
    usual = {"head_dim": raw["head_dim"], "num_key_value_heads": raw["num_key_value_heads"]}
    sizes: dict[int, dict[str, int]] = {}
    for key, given in stated.items():
        number = int(key) if isinstance(key, int | str) and str(key).isdecimal() and len(str(key)) < 9 else -1
        if not 0 <= number < len(kinds) or not isinstance(given, Mapping):
            raise malformed("per_layer_config", stated, "sizes of layers by their number")
        for name, value in given.items():
            if name not in _OF_LAYER and value != raw.get(name):
                reason = f"aiakq's gemma4_text models have the same {name!s:.64} in every layer"
                raise error("config_key_unsupported", key="per_layer_config", value=f"{value!r:.64}", reason=reason)
        sizes[number] = {name: int(read_value(given, SIZE, name, default=usual[name])) for name in usual}
    for kind in set(kinds):
        of_kind = [sizes.get(layer, usual) for layer, each in enumerate(kinds) if each == kind]
        if any(each != of_kind[0] for each in of_kind):
            raise malformed("per_layer_config", stated, f"the same sizes for all layers with {kind}")
    return {number: own for number, own in sizes.items() if own != usual}


def heads_of_layers(raw: Mapping[str, Any], heads: int) -> dict[int, tuple[int, int]]:
    """Return head_dim and number of key heads of the layers that have others than the model; none in other families.

    heads  number of query heads, which key heads divide. Raises ``model_malformed``.
    """
    if raw.get("model_type") not in ("gemma4_text", "mimo_v2_flash"):
        return {}
    if raw["model_type"] == "mimo_v2_flash":  # twice as many key heads in layers with a window
        own = raw["head_dim"], 2 * raw["num_key_value_heads"]
        found = {layer: own for layer, kind in enumerate(raw["layer_types"]) if kind == "sliding_attention"}
    else:
        found = {layer: (own["head_dim"], own["num_key_value_heads"]) for layer, own in raw["per_layer_config"].items()}
    for head_dim, kv_heads in found.values():
        if head_dim % 2 or heads % kv_heads:
            stated = f"{heads} attention heads cannot share {kv_heads} key-value heads of {head_dim} elements"
            raise error("model_malformed", file="config.json", reason=stated)
    return found


def cache_sources(raw: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[int, int]:
    """Return the layers that have no keys and values -> the last layer of their kind that has; none in other families.

    Raises ``model_malformed`` if a layer has nothing to read.
    """
    if raw.get("model_type") not in _SHARE_KEYS or not raw["num_kv_shared_layers"]:
        return {}
    shared = int(read_value(raw, COUNT, "num_kv_shared_layers"))
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, len(kinds) - shared)])}
    if set(kinds) != set(last):
        reason = f"the last {shared} layers share keys and values, but no layer before them has any for each kind"
        raise error("model_malformed", file="config.json", reason=reason)
    return {layer: last[kinds[layer]] for layer in range(len(kinds) - shared, len(kinds))}
