"""Tensors of a checkpoint that aiakq does not use, and that change nothing in what the model computes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

#: Tensors that files may contain but models compute themselves: rotary frequencies, the decays of lightning attention,
#: and, with four dimensions, masks.
_COMPUTED = re.compile(
    r"(.*\.)?(((maybe_)?rotary(_emb)?\.(inv_freq|(cos|sin)_cached))|(attention|attn)\.masked_bias|decoder\.version"
    r"|self_attn\.(slope_rate|(query|key|diagonal)_decay))"
)
_MASKS = (".attention.bias", ".attn.bias", ".attn.causal_mask")
_NUMBERS = r"(global_|rcp_)?(scales?|scale_inv|scaling_factor|zero_points?|zeros|offset|a?max)"
#: Scales for a quantized KV cache or quantized attention, as llm-compressor, ModelOpt, Quark, AutoRound, TensorRT-LLM
#: and others name them. aiakq computes a scale for every token and head of an 8-bit cache, which is no less precise.
_CACHE_SCALES = re.compile(
    r"(.*\.)?("
    rf"_?([qkv]|key|value|kv|([kv]|key|value|kv)_cache|prob|prob_output|softmax|attn_output)_{_NUMBERS}(_float)?"
    rf"|(kv_cache_[kv]|past_(key|value)|[kv]_static)_{_NUMBERS}|[kv]_zp|fa_[qkv]\.{_NUMBERS}"
    rf"|([qkv]|qkv|kv|q_[ab]|kv_b)_proj\.(output|out|[qkv]|kv)_{_NUMBERS}"
    rf"|(kv_a_proj_with_mqa|fused_qkv_a_proj(_with_mqa)?|c_attn|W_pack|Wqkv|query_key_value)\.(output|[qkv]|kv)_{_NUMBERS}"
    rf"|([qkv]|([kv]|key|value|kv)_cache)\.{_NUMBERS}"
    r"|kv_(orig_quant|quant_orig)_scale"
    r"|([qkv]|[qkv]_bmm|kv|softmax|p_bmm)_(fake_)?quantizer\..+"
    r"|(([qkv]|qkv|kv|q_[ab]|kv_b)_proj|kv_a_proj_with_mqa|c_attn|W_pack|Wqkv|query_key_value)\.output_quantizer\..+"
    r")"
)
#: Modules that have neither queries nor keys.
_NOT_ATTENTION = re.compile(r"(.*\.)?(mlp|experts?|feed_forward|ffn|moe|block_sparse_moe)\..*")


def is_computed(name: str, shape: Sequence[int]) -> bool:
    """Whether models compute the tensor ``name``, if they need it at all."""
    return _COMPUTED.fullmatch(name) is not None or (name.endswith(_MASKS) and len(shape) == 4)


def is_cache_scale(name: str) -> bool:
    """Whether the tensor ``name`` is a scale or zero point of queries, keys, values or their cache."""
    return _CACHE_SCALES.fullmatch(name) is not None and _NOT_ATTENTION.match(name) is None


def beside_model(names: Iterable[str], used: Collection[str]) -> set[str]:
    """Return those of ``names`` that belong to modules beside the text model: heads for training (``v_head.*``),
    layers that predict further tokens (``model.mtp.*``), encoders of images (``model.visual.*``).

    used  names that belong to the model. Another name in one of its outermost modules is not beside it.
    """
    own = {name.partition(".")[0] for name in used} | _OUTERMOST
    beside = {name for name in names if "." in name and name.partition(".")[0] not in own}
    return beside | {name for name in names if _BESIDE_TEXT.match(name)}


#: Outermost modules of models, in which a tensor without a place means that the config does not match.
_OUTERMOST = {"model", "transformer", "language_model", "lm_head", "backbone", "gpt_neox", "module", "base_model"}

#: Modules inside the outermost one that text does not pass through.
_BESIDE_TEXT = re.compile(
    r"(model\.|transformer\.|language_model\.)+"
    r"(mtp(_\w+)?|visual|(vision|audio|image|video)(_\w+)?|mm_projector|multi_modal_projector|embed_(vision|audio))\."
)
_LAYER = re.compile(r"(.*\.)?layers\.([0-9]{1,6})\.")
#: Keys and values of a layer.
_KEYS = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")
#: Modules of a layer that predicts further tokens, as DeepSeek-V3, GLM-4.5 and their relatives name them.
_PREDICTS_FURTHER = re.compile(r"(eh_proj|enorm|hnorm|shared_head)\.")


def prediction_layers(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Return the prefixes of the layers beyond the model's ``num_layers`` that predict further tokens.

    They are known by their modules: what config.json says of their number does not make a layer one of them.
    """
    found = set()
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None and int(layer[2]) >= num_layers and _PREDICTS_FURTHER.match(name, layer.end()):
            found.add(layer[0])
    return tuple(sorted(found))


def of_first_prediction_layer(names: Iterable[str], num_layers: int) -> set[str]:
    """Return those of ``names`` that belong to the first layer behind the model's ``num_layers`` that predicts further
    tokens, which speculative decoding may read.
    """
    names = set(names)
    first = tuple(each for each in prediction_layers(names, num_layers) if each.endswith(f"layers.{num_layers}."))
    return {name for name in names if name.startswith(first)}


def describe(names: Collection[str]) -> list[str]:
    """Return one phrase per kind of tensor that is left out, for the start-up table and ``aiakq inspect``."""
    scales, keys = [name for name in names if is_cache_scale(name)], _unread_keys(names)
    others = sorted({_module(name) for name in names if not is_cache_scale(name) and name not in keys})
    found = []
    if scales:
        found.append(f"{len(scales)} scales of a quantized KV cache, which has scales of its own here")
    if keys:
        found.append(f"{len(keys)} tensors of keys and values in layers that read those of earlier ones")
    if others:
        count = len(names) - len(scales) - len(keys)
        found.append(f"{count} tensor{'s' * (count > 1)} beside the model: {', '.join(others[:5])[:200]}")
    return found


def _unread_keys(names: Collection[str]) -> set[str]:
    """Return those of ``names`` that belong to layers of which nothing but keys and values is left out (Gemma 4)."""
    layers: dict[str, set[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None and not is_cache_scale(name):
            layers.setdefault(layer[0], set()).add(name)
    return {name for each in layers.values() if all(map(_KEYS.search, each)) for name in each}


def _module(name: str) -> str:
    """Return the outermost module of a tensor that is beside the model, or the layer that is."""
    layer = _LAYER.match(name)
    first, _, rest = name.partition(".")
    if layer is not None and first in _OUTERMOST and _BESIDE_TEXT.match(name) is None:
        return layer[0].removesuffix(".")
    return f"{first}.{rest.partition('.')[0]}" if first in _OUTERMOST else first
