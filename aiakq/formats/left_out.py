"""Tensors of a checkpoint that aiakq does not use, and that change nothing in what the model computes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

#: Suffixes of tensors that files may contain but models compute themselves.
COMPUTED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias", "decoder.version", "act.scales")
#: Scales for a quantized KV cache or quantized attention, as llm-compressor, ModelOpt, Quark, AutoRound and others name
#: them. aiakq computes a scale for every token and head of an 8-bit cache, which is at least as precise.
_CACHE_SCALES = re.compile(
    r"(.*\.)?("
    r"([qkv]|kv|[kv]_cache|kv_cache|prob|prob_output|softmax|attn_output)_(global_)?(scale|scale_inv|zero_point|offset)"
    r"|([qkv]|qkv|kv)_proj\.(output|[qkv]|kv)_(scale|zero_point)"
    r"|([qkv]|[kv]_cache|kv_cache)\.(scale|zero_point)"
    r"|([qkv]|softmax)_bmm_quantizer\..+"
    r")"
)


def is_cache_scale(name: str) -> bool:
    """Whether the tensor ``name`` is a scale or zero point of queries, keys, values or their cache."""
    return _CACHE_SCALES.fullmatch(name) is not None


def beside_model(names: Iterable[str], used: Collection[str]) -> set[str]:
    """Return those of ``names`` that belong to modules beside the model, such as heads for training (``v_head.*``).

    used  names that belong to the model. A name in one of its outermost modules is not beside it.
    """
    own = {name.partition(".")[0] for name in used} | _OUTERMOST
    return {name for name in names if "." in name and name.partition(".")[0] not in own}


#: Outermost modules of models, in which a tensor without a place means that the config does not match.
_OUTERMOST = {"model", "transformer", "language_model", "lm_head", "backbone", "gpt_neox", "module", "base_model"}


def describe(names: Collection[str]) -> list[str]:
    """Return one phrase per kind of tensor that is left out, for the start-up table and ``aiakq inspect``."""
    scales = [name for name in names if is_cache_scale(name)]
    others = sorted({name.partition(".")[0] for name in names if not is_cache_scale(name)})
    found = []
    if scales:
        found.append(f"{len(scales)} scales of a quantized KV cache, which has scales of its own here")
    if others:
        count = len(names) - len(scales)
        found.append(f"{count} tensor{'s' * (count > 1)} beside the model: {', '.join(others[:5])[:200]}")
    return found
