"""The settings of a model as keys of a GGUF file, and the proof that its reader finds the same model in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
from torch import Tensor

from aiakq.convert.gguf.rotary import effective_rope, full_rope, rope_keys, rope_tensors
from aiakq.errors import AiakqError, error
from aiakq.formats.gguf_model import FAMILIES, config_of
from aiakq.formats.gguf_model.family import EPSILONS, GGUFFamily, Shapes
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.runtime.config.families import FAMILIES as CONFIG_FAMILIES
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import rotated_layers

#: Architectures of files that are read as another family's, or from which no converter's file was at hand.
_READ_ONLY = frozenset({"qwen", "exaone", "minicpm", "baichuan", "internlm2", "xverse", "chatglm"})
#: Architecture in config.json -> in files.
WRITTEN: Mapping[str, str] = {
    **{family.architecture: name for name, family in FAMILIES.items() if name not in _READ_ONLY},
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Olmo3ForCausalLM": "olmo2",
}
#: Architectures that are computed alike where the configs agree.
_ALIKE = {("MistralForCausalLM", "LlamaForCausalLM")}
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_ROUTED = {
    **_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
#: Architecture of files -> key -> name in config.json. Keys whose value is not set are left out.
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "llama": {**_EXPERTS, "expert_count": "num_local_experts"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "command-r": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale"},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_EXPERTS, "expert_count": "num_local_experts"},
    "qwen2moe": {
        **_EXPERTS,
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {**_EXPERTS, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
    "olmoe": {**_EXPERTS, "expert_count": "num_experts", "attention.clamp_kqv": "clip_qkv"},
    "glm4moe": _ROUTED,
    "deepseek2": {**_ROUTED, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"},
    "gpt-oss": {
        **_EXPERTS,
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
    },
    "llama4": {
        **_EXPERTS,
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
}
#: Architectures of files whose readers use a window; those that need a list of the layers with one.
_WINDOWED = frozenset({"llama", "phi3", "gemma2", "gemma3", "cohere2", "olmo2", "exaone4", "gpt-oss"})
_LISTED = frozenset({"olmo2", "exaone4"})
#: Sizes and settings of config.json that ModelConfig has under names of its own.
_NORMALIZED = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        *("norm_epsilon", "hidden_act", "hidden_activation", "activation_function", "activation", "n_inner"),
        *("tie_word_embeddings", "sliding_window", "layer_types", "sliding_window_pattern", "use_sliding_window"),
        *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"),
        *("vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "num_kv_heads", "ffn_hidden_size"),
        *("max_window_layers", "n_heads", "n_layers", "d_model", "max_seq_len"),
    }
)
#: Settings that the tensors of the checkpoint decide, which are compared themselves, or that change no answer.
_IN_TENSORS = frozenset(
    {
        *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "no_bias", "use_qk_norm", "moe_layers"),
        *("learned_pos_emb", "num_nextn_predict_layers"),
    }
)
_ROTATED = frozenset({"no_rope_layers", "no_rope_layer_interval"})


def family_for(model: ModelConfig) -> str:
    """Return the architecture of files for a model. Raises ``gguf_not_written`` for a family that is not written."""
    if model.architecture not in WRITTEN:
        known = ", ".join(sorted(set(WRITTEN.values())))
        raise error("gguf_not_written", what=model.architecture, reason=f"aiakq writes {known}")
    return WRITTEN[model.architecture]


def model_keys(model: ModelConfig) -> dict[str, object]:
    """Return the keys of a model, by full name, with ``general.architecture``. Raises ``gguf_not_written``."""
    name = family_for(model)
    family = FAMILIES[name]
    keys: dict[str, object] = {
        "block_count": model.num_layers,
        "context_length": model.max_position,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        EPSILONS[family.epsilon]: float(model.norm_eps),
        "vocab_size": model.vocab_size,
    }
    if family.rotary:
        keys |= {"attention.key_length": model.head_dim, "attention.value_length": model.head_dim}
        keys |= rope_keys(model, rotated_width(family, model))
    for key, setting in _SETTINGS.get(name, {}).items():
        if model.raw.get(setting) is not None:
            keys[key] = model.raw[setting]
    keys |= _window_keys(name, model)
    if name in _SPECIAL:
        keys |= _SPECIAL[name](model)
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}


def rotated_width(family: GGUFFamily, model: ModelConfig) -> int:
    """Return the number of elements of a head, of which ``partial_rotary_factor`` are rotated."""
    return int(model.raw["qk_rope_head_dim"]) if family.latent else model.head_dim


def factor_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of rotary factors of a file, by name."""
    family = FAMILIES[family_for(model)]
    return rope_tensors(model, rotated_width(family, model)) if family.rotary else {}


def _window_keys(name: str, model: ModelConfig) -> dict[str, object]:
    windows = {window for window in model.sliding_windows if window}
    if name not in _WINDOWED or len(windows) != 1:
        return {}
    listed = [window is not None for window in model.sliding_windows]
    keys: dict[str, object] = {"attention.sliding_window": windows.pop()}
    return keys | ({"attention.sliding_window_pattern": listed} if name in _LISTED else {})


def _deepseek2(model: ModelConfig) -> dict[str, object]:
    raw = model.raw
    rank, rope, value = int(raw["kv_lora_rank"]), int(raw["qk_rope_head_dim"]), int(raw["v_head_dim"])
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": int(raw["qk_nope_head_dim"]) + rope,
        "attention.value_length_mla": value,
        "expert_gating_func": 2 if model.architecture == "DeepseekV3ForCausalLM" else 1,
    }


def _phi3(model: ModelConfig) -> dict[str, object]:
    trained = model.raw["original_max_position_embeddings"]
    original = full_rope(model).get("original_max_position_embeddings") or trained
    return {"rope.scaling.original_context_length": int(original)}


def _mpt(model: ModelConfig) -> dict[str, object]:
    attention = model.raw.get("attn_config") or {}
    alibi = float(attention.get("alibi_bias_max", 8)) if attention.get("alibi", True) else 0.0
    clip = attention.get("clip_qkv")
    keys: dict[str, object] = {"attention.max_alibi_bias": alibi}
    return keys if clip is None else {**keys, "attention.clamp_kqv": float(clip)}


#: Architecture of files -> keys that are no single setting of config.json.
_SPECIAL: Mapping[str, Callable[[ModelConfig], dict[str, object]]] = {
    "deepseek2": _deepseek2,
    "mpt": _mpt,
    "phi3": _phi3,
    "falcon": lambda model: {"tensor_data_layout": "jploski"},
    "glm4moe": lambda model: {"expert_gating_func": 2},
}


def window_note(model: ModelConfig) -> str:
    """Return a warning about windows that programs other than aiakq do not apply; empty if there are none."""
    if family_for(model) not in ("llama", "starcoder2") or not any(model.sliding_windows):
        return ""
    window = next(each for each in model.sliding_windows if each)
    return f"llama.cpp does not apply the window of {window} positions that this model has: longer texts differ there."


# --- the proof --------------------------------------------------------------------------------------------------------


def check_keys(
    keys: Mapping[str, object], model: ModelConfig, shapes: Shapes, read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Return the config.json that the reader makes of ``keys``.

    keys    those of a new file, with float32 in place of floats.
    model   the model that it should be.
    shapes  tensor of the file -> shape.
    read    returns one of its tensors of rotary factors.

    Raises ``gguf_not_written`` for a setting that such files do not hold, by name.
    """
    try:
        config = config_of(Metadata(stored(keys), "the new file"), shapes, read)
        found = ModelConfig.from_hf(config)
    except AiakqError as problem:
        raise error("gguf_not_written", what=model.architecture, reason=str(problem).splitlines()[0]) from problem
    for name, value, wanted in _differences(found, model):
        reason = f"its {name} is {wanted!r:.80}, and such a file can only say {value!r:.80}"
        raise error("gguf_not_written", what=model.architecture, reason=reason)
    return config


def stored(keys: Mapping[str, object]) -> dict[str, object]:
    """Return keys as they are read from a file: floats are rounded to float32."""
    return {key: _rounded(value) if isinstance(value, float) else value for key, value in keys.items()}


def _differences(found: ModelConfig, model: ModelConfig) -> list[tuple[str, object, object]]:
    """Return name, value that was found, and value that is wanted, of the settings that differ."""
    pairs: list[tuple[str, object, object]] = []
    if found.architecture != model.architecture and (model.architecture, found.architecture) not in _ALIKE:
        pairs.append(("architecture", found.architecture, model.architecture))
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
        *("max_position", "norm_eps", "activation", "layer_kinds", "sliding_windows"),
    ):
        pairs.append((name, getattr(found, name), getattr(model, name)))
    pairs.append(("rope", effective_rope(found.rope, found), effective_rope(model.rope, model)))
    settings = CONFIG_FAMILIES[str(model.raw["model_type"])].defaults.keys() - _NORMALIZED - _IN_TENSORS
    if model.raw.get("new_decoder_architecture"):
        settings -= {"multi_query"}  # which Falcon then does not read
    if settings & _ROTATED:
        ours, theirs = (rotated_layers(side.raw, side.num_layers) for side in (found, model))
        pairs.append(("no_rope_layers", ours, theirs))
    for name in sorted(settings - _ROTATED):
        value, wanted = found.raw.get(name), model.raw.get(name)
        if name == "attn_config":
            used = ("alibi", "alibi_bias_max", "clip_qkv", "qk_ln", "prefix_lm", "softmax_scale")
            value, wanted = ({each: (side or {}).get(each) for each in used} for side in (value, wanted))
        pairs.append((name, value, wanted))
    return [(name, *_apart(value, wanted)) for name, value, wanted in pairs if not _same(value, wanted)]


def _apart(one: object, other: object) -> tuple[object, object]:
    """Return two values, of objects only what differs."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one, other
    names = [name for name in one.keys() | other.keys() if not _same(one.get(name), other.get(name))]
    return tuple({name: each[name] for name in sorted(names) if name in each} for each in (one, other))  # type: ignore[return-value]


def _same(one: object, other: object) -> bool:
    """Whether two values are the same to float32, which files hold; nothing, false, zero and none are the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_same(one.get(name), other.get(name)) for name in one.keys() | other.keys())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return _rounded(float(one)) == _rounded(float(other))
    return one == other or not (one or other)


def _rounded(value: float) -> float:
    return float(numpy.float32(value))
