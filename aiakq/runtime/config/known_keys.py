"""Which keys of config.json are understood: computed with, without effect, or refused by name.

A key is computed with if it is in the table of its family (family_keys.py), and it has no effect if it is in
``WITHOUT_EFFECT`` or its value means that something is off. Any other key may change the arithmetic in the library that
wrote it, and is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import COUNT, OBJECT, SWITCH, malformed, read_value
from aiakq.formats.quantization_config import CONFIG_KEYS, MLX_KEY
from aiakq.runtime.config.encoder_families import ENCODER_FAMILIES, ENCODER_TYPES, encoder_config, encoder_of
from aiakq.runtime.config.families import FAMILIES, MODEL_TYPES
from aiakq.runtime.config.family_keys import KIMI_LINEAR_ATTENTION, REQUIRED, Family
from aiakq.runtime.config.speech import SPEECH_ARCHITECTURES

#: Read for every family: what it is, its weights, and lengths that only limit the context.
_ALWAYS = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "aiakq", "seq_length", *CONFIG_KEYS, MLX_KEY),
        *("num_labels", "problem_type", "classifier_from_token", "sentence_transformers"),
        *("is_matryoshka", "matryoshka_dimensions", "auto_map", "max_window_layers"),
        "max_position_embeddings",  # the context length, also where there are no positions
    }
)
ROTARY = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}) | {
    "original_max_position_embeddings"
}
#: Sizes, whose tensors the loader compares with those of the checkpoint: of families without such layers, nothing.
SHAPES = frozenset(
    {
        *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size", "num_experts"),
        *("num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "num_shared_experts"),
        *("shared_expert_intermediate_size", "intermediate_size_mlp", "n_embd", "n_layer", "n_head", "d_model"),
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "n_heads", "n_layers", "ffn_size"),
        *("moe_num_experts", "moe_topk", "num_experts_per_token", "expert_dim", "decoder_layers", "decoder_ffn_dim"),
        *("encoder_layers", "encoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads", "embedding_size"),
        *("embed_dim", "num_layers", "num_heads", "num_key_value_heads", "first_k_dense_replace", "moe_k"),
        *("moe_layer_start_index", "moe_num_shared_experts", "num_shared_expert"),
    }
)
#: Keys of rotary parameters that are computed with; several positions of a token (mrope) are the same in text.
ROTARY_PARAMETERS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "truncate"),
        *("mscale_all_dim", "short_factor", "long_factor", "short_mscale", "long_mscale", "grows_from"),
        *("mrope_section", "mrope_interleaved", "finetuned"),
    }
)
#: Those that are numbers.
_ROTARY_NUMBERS = frozenset(
    {
        *("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor"),
        *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "grows_from"),
        *("short_mscale", "long_mscale", "llama_4_scaling_beta", "alpha"),
    }
)
#: Keys of MPT's attention that are computed with, refused by its model, or read by no model of transformers.
_MPT_ATTENTION = frozenset(
    {
        *("attn_type", "clip_qkv", "softmax_scale", "prefix_lm", "qk_ln", "alibi", "alibi_bias_max"),
        *("attn_impl", "attn_pdrop", "attn_uses_sequence_id", "model_type", "dtype", "torch_dtype"),
    }
)
#: Keys with objects -> the keys that these may have.
_NESTED: Mapping[str, frozenset[str]] = {
    "rope_parameters": ROTARY_PARAMETERS,
    "rope_scaling": ROTARY_PARAMETERS,
    "attn_config": _MPT_ATTENTION,
    "linear_attn_config": KIMI_LINEAR_ATTENTION,
}
#: Keys of any family -> the only values that are supported.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "rotary_pct": (1.0,),
    "rotary_emb_base": (10000,),
    "use_rotary": (True,),
    "use_mrope": (False,),  # of Qwen's authors: one position for each token
    "rope_interleaved": (False,),
    "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
    "chunk_size_feed_forward": (0,),
    "text_config": (),
    **dict.fromkeys(("decoder_sparse_step", "n_group", "topk_group"), (1,)),
    "moe_layer_freq": (1,),
}
#: Patterns of keys without effect on the answers -> why.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "it says where the file comes from": (
        *("_name_or_path", "name_or_path", "model_name", "base_model*", "_commit_hash", "*version", "transformers.js*"),
        *("license*", "unsloth*", "_unsloth*", "finetuning_task", "task_specific_params", "custom_pipelines"),
        *(
            "is_llama_config",
            "_from_model_config",
            "_diffusers*",
            "language",
            "languages",
            "lang",
            "tags",
            "datasets",
            "hub_*",
            "author*",
        ),
        *("description", "prefix", "comment*", "_comment*", "note*", "merge*", "mergekit*", "organization", "url"),
    ),
    "it is used in training only": (
        *("*dropout*", "*_pdrop", "*layerdrop*", "initializer_*", "init_*", "*_init_*", "*loss*", "*_aux_*", "seq_aux"),
        *("gradient_checkpointing*", "label_smoothing*", "*learning_rate*", "weight_decay*", "train*", "pretraining_*"),
        *("pretrain_*", "*warmup*", "optimizer*", "seed", "freeze_*", "z_loss*", "router_z*", "ignore_index", "lr_*"),
        *("rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
        *("*_jitter_noise", "max_train*", "neftune*", "lora_*", "peft*", "num_train*", "mlp_lr*", "sft_*"),
    ),
    "it selects what transformers returns": (
        *("output_*", "return_dict*", "use_return_dict", "keys_to_ignore*", "num_logits_to_keep"),
    ),
    "it belongs to classifiers": (
        *("id2label", "label2id", "classifier_*", "summary_*", "pooler_*", "sbert_ce*", "finetuned", "reduction"),
        *("is_original_qwen3_reranker",),
    ),
    "it belongs to the tokenizer": (
        *("*_token_id", "*_token_ids", "*_token", "*_token_index", "*_tokens", "tokenizer*", "vocab_file"),
        *("prefix_token*", "pad_vocab_size_multiple", "pad_vocab_size_multiple_of", "chat_template"),
    ),
    "it belongs to generate(), whose settings are read from generation_config.json": (
        *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
        *("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("diversity_penalty", "length_penalty", "early_stopping", "repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "remove_invalid_values", "forced_decoder_ids"),
        *("exponential_decay_length_penalty", "penalty_alpha", "generation_config", "max_window_size", "stop_words*"),
    ),
    "it is about speed, memory or the precision of intermediate results": (
        *("use_cache*", "cache_implementation", "*attn_implementation*", "_flash_attn*", "flash_attn*", "*flash_att*"),
        *("*use_sdpa*", "torchscript", "*_in_fp32", "*softmax_fp32*", "reorder_and_upcast_attn", "slow_but_exact"),
        *(
            "apply_query_key_layer_scaling",
            "use_bfloat16",
            "bf16",
            "fp16",
            "fp32",
            "use_fused*",
            "fused_*",
            "*chunk_size",
        ),
        *("chunk_size_*", "use_mamba_kernels", "init_device", "parallelize", "ep_size", "tp_size", "device*", "onnx*"),
        *(
            "tensor_parallel*",
            "pipeline_parallel*",
            "max_batch_size",
            "offload*",
            "*_kernels",
            "*_kernel_*",
            "kv_dtype",
        ),
        *("use_cpu*", "xla_device", "use_xla", "use_triton*", "use_deepspeed*", "deepspeed*", "*_implementation"),
        *("shard*", "max_shard*", "low_cpu*", "softmax_precision", "no_inplace*"),
    ),
    "it is about encoders or TensorFlow": (
        *("is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size", "pruned_heads", "tf_legacy_loss"),
        *("use_tf*", "decoder_start_token*", "type_vocab_size", "max_text_positions"),
    ),
    "it describes layers that predict further tokens, which are not used": (
        *("num_nextn_predict_layers", "num_mtp_*", "mtp_*", "n_predict", "num_mtp_modules"),
    ),
    "the context length is max_position_embeddings": (
        *("max_seq_len*", "max_sequence_length", "model_max_length", "n_ctx", "max_model_len", "n_positions"),
        *(
            "max_position",
            "max_context*",
            "context_length",
            "context_window_size",
            "initial_context_length",
            "runner_max_sequence_length",
            "max_seq_length",
        ),
    ),
}
#: Unknown keys that do something when they are false or zero: what they name is on in the native families.
_ON_UNLESS_FALSE = (
    *("*causal*", "*unidirectional*", "*autoregressive*", "*rope*", "*rotary*", "*theta*", "*rms*", "*gate*", "*glu*"),
    *("*residual*", "*prenorm*", "*pre_norm*", "*pre_ln*", "*pre_layer*norm*", "*norm_first*", "*norm_before*"),
    *("*normalize_before*", "*scale_attn*", "tie_*", "*_tied*"),
)
#: Unknown factors, which are neutral when they are one, and not when they are zero.
_FACTORS = (
    *("*multiplier*", "*scale", "*scaling", "*_factor", "*scale_factor*", "alpha", "*_alpha", "*temperature*", "*_tp"),
)
#: Unknown numbers that do something when they are zero, besides.
_NOT_ZERO = ("*eps", "*epsilon", "scale_*")
#: Longer keys are not compared with patterns.
_MAX_KEY = 128


def _one_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression for all of the shell patterns."""
    return re.compile("|".join(map(translate, patterns)))


_EFFECTLESS = {reason: _one_of(patterns) for reason, patterns in WITHOUT_EFFECT.items()}
_ON = _one_of(_ON_UNLESS_FALSE)
_FACTOR = _one_of(_FACTORS)
_COUNTS_AT_ZERO = _one_of((*_ON_UNLESS_FALSE, *_FACTORS, *_NOT_ZERO))
#: Keys whose null means that something is off or follows from other sizes.
_NULLABLE = frozenset(
    {
        *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "num_key_value_heads", "head_dim"),
        *("q_lora_rank", "attention_chunk_size", "use_bidirectional_attention", "num_kv_heads", "mamba_d_ssm"),
    }
)
#: Types of values whose default is None.
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("use_bidirectional_attention",), bool),
    **dict.fromkeys(("clip_qkv", "final_logit_softcapping", "attn_logit_softcapping", "rope_local_base_freq"), float),
    **dict.fromkeys(("n_group", "topk_group", "num_experts_per_tok", "num_ln_in_parallel_attn"), int),
    **dict.fromkeys(
        ("block_types", "sliding_window_pattern", "mamba_d_head", "time_step_rank", "mamba_dt_rank", "moe_topk"), object
    ),  # checked where they are read
    **dict.fromkeys(("no_rope_layers", "mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs"), list),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), list),
    **dict.fromkeys(("attn_config", "per_layer_config"), dict),
    **dict.fromkeys(("position_embedding_type",), str),
}
#: Numbers that are divided by.
_POSITIVE = frozenset(
    {
        *("decoder_sparse_step", "n_group", "topk_group", "full_attention_interval", "interleave_moe_layer_step"),
        *("no_rope_layer_interval", "query_pre_attn_scalar", "logits_scaling", "floor_scale"),
        *("attn_layer_period", "expert_layer_period"),
        *("block_multiple_of", "block_ffn_dim_multiplier", "expansion_ratio", "rotary_dim", "rope_local_base_freq"),
        *("attention_chunk_size", "num_experts_per_tok", "max_position_embeddings", "intermediate_size"),
    }
)
_ROTARY_NUMBER = Constraint(type=float, low=1 - 2**31, high=2**31 - 1)
#: Constraints of values by their type; a float is finite.
_OF_TYPE = {
    bool: SWITCH,
    dict: OBJECT,
    str: Constraint(type=str),
    float: Constraint(type=float, low=-sys.float_info.max, high=sys.float_info.max),
    int: COUNT,
}
#: Taps of convolutions, which need a state: with one there is none.
_TAPS = frozenset({"conv1d_width", "conv_L_cache", "conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv"})
_OFF: tuple[object, ...] = (None, False, "", [], {})


def model_type_of(raw: Mapping[str, object], architecture: str) -> str:
    """Return the native family of ``architecture``; another value of ``model_type`` if it is none.

    Raises ``config_key_unsupported`` if ``model_type`` names another native family.
    """
    stated = raw.get("model_type")
    family = MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    if stated == "eagle3" or family not in FAMILIES or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return str(stated or "")
    if isinstance(stated, str) and stated in FAMILIES and stated != family:
        raise _refused("model_type", stated, f"architectures is {architecture}, which is of the family {family}")
    return family


def completed(raw: Mapping[str, object], architecture: str) -> dict[str, Any]:
    """Return the contents of config.json with one spelling of each key and the defaults of its family that do not
    follow from other keys.

    The configs of other families than the native ones are returned as they are.

    Raises ``config_key_unsupported`` for a key that may change the arithmetic and is not supported, and
    ``model_malformed`` for values of another type than their key's.
    """
    kind = model_type_of(raw, architecture)
    family = (ENCODER_FAMILIES if architecture in ENCODER_TYPES else FAMILIES).get(kind)
    # Of Whisper's classes, only the one that reads audio is native.
    if family is None or kind in SPEECH_ARCHITECTURES.values() and architecture not in SPEECH_ARCHITECTURES:
        return dict(raw)
    config = _one_spelling(raw, family)
    for key, value in config.items():
        _check(key, value, family, kind)
        if family.rotary:
            _check_rotary(key, value)
        if key in _NESTED and isinstance(value, Mapping):
            _check_nested(key, value, kind)
    others = SHAPES - family.defaults.keys() - REQUIRED - family.unread
    config = {key: value for key, value in config.items() if key not in others}
    stated = {key: value for key, value in family.defaults.items() if value is not None}
    return {**stated, **config, "model_type": kind}


def check_keys(raw: Mapping[str, object]) -> None:
    """Raise what ``completed`` raises for config.json ``raw``, or its text part, without completing it."""
    text, names = raw.get("text_config"), raw.get("architectures")
    if isinstance(text, Mapping):
        raw, names = text, None
    config, architecture = with_floats(dict(raw)), str(names[0]) if isinstance(names, list) and names else ""
    encoder = encoder_of(architecture)
    completed(config if encoder is None else encoder_config(config, encoder), encoder or architecture)


def with_floats(value: object) -> Any:
    """Return ``value`` with decoded non-finite floats, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: with_floats(entry) for name, entry in value.items()}
    return [with_floats(entry) for entry in value] if isinstance(value, list) else value


def _one_spelling(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return ``raw`` with aliases replaced. Raises ``model_malformed`` if two spellings have different values."""
    config = dict(raw)
    for alias, key in family.aliases.items():
        if alias not in config:
            continue
        value = config.pop(alias)
        if config.setdefault(key, value) != value and value is not None:
            reason = f"{alias} is {value!r:.64}, but {key}, which means the same, is {config[key]!r:.64}"
            raise error("model_malformed", file="config.json", reason=reason)
    return config


def _check(key: str, value: object, family: Family, kind: str) -> None:
    """Raise ``config_key_unsupported`` or ``model_malformed`` unless the key is understood."""
    allowed = family.fixed.get(key, None if key in family.defaults else _FIXED.get(key))
    if allowed is not None:
        if value is not None and value not in allowed:
            raise _refused(key, value, _only(allowed, kind))
    elif key in family.defaults:
        listed = value if key in family.by_layer and isinstance(value, list) else [value]
        for each in listed:
            _check_type(key, each, family.defaults[key])
        if key.endswith("softcapping") and value == 0:
            raise _refused(key, value, "a cap of 0 makes all scores equal, and null is none")
    elif not (
        key in _ALWAYS | REQUIRED | family.unread
        or (family.rotary and key in ROTARY)
        or key in SHAPES
        or is_off(key, value)
        or without_effect(key)
    ):
        raise _refused(key, value, f"transformers' {kind} models have no such key")


def _check_nested(key: str, values: Mapping[str, object], kind: str) -> None:
    """Raise ``config_key_unsupported`` for a key of an object in config.json that is not understood."""
    family = FAMILIES.get(kind)
    known = _NESTED[key] if family is None else _NESTED[key] | family.rope_keys
    for name, value in values.items():
        _check_rotary(name, value)
        if name in known or is_off(name, value) or without_effect(name):
            continue
        if isinstance(value, Mapping):  # parameters of a kind of layers
            _check_nested(key, value, kind)
        else:
            reason = f"aiakq's {kind} models do not compute with {name}"
            raise error("config_key_unsupported", key=key, value=f"{{{name!r:.64}: {value!r:.64}}}", reason=reason)


def _check_rotary(name: str, value: object) -> None:
    """Raise ``model_malformed`` for a rotary parameter that is not the number it should be."""
    if name not in _ROTARY_NUMBERS or value is None:
        return
    read_value({name: value}, _ROTARY_NUMBER, name)


def check_unknown(key: str, value: object, kind: str) -> None:
    """Raise ``config_key_unsupported`` for a key that no code of the family ``kind`` reads, unless it has no effect."""
    allowed = _FIXED.get(key)
    if allowed is not None and value is not None and value not in allowed:
        raise _refused(key, value, _only(allowed, kind))
    if allowed is None and key not in _ALWAYS | ROTARY | SHAPES and not is_off(key, value) and not without_effect(key):
        raise _refused(key, value, f"transformers' {kind} models have no such key")


def without_effect(key: str) -> str | None:
    """Return why a key of config.json has no effect, or None if it may have one."""
    if len(key) > _MAX_KEY:
        return None
    return next((reason for reason, pattern in _EFFECTLESS.items() if pattern.match(key)), None)


def is_off(key: str, value: object) -> bool:
    """Whether the value of an unknown key means that what it controls is off."""
    if len(key) > _MAX_KEY or (value is False and _ON.match(key)):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _COUNTS_AT_ZERO.match(key) is None if value == 0 else value == 1 and _FACTOR.match(key) is not None
    return value in _OFF


def _check_type(key: str, value: Any, default: object) -> None:
    """Raise ``model_malformed`` for a value of another type than the key's."""
    if value is None:
        if default is None or key in _NULLABLE:
            return
        raise error("model_malformed", file="config.json", reason=f"{key} is null")
    expected = _TYPES.get(key, None if default is None else type(default))
    if expected in (list, tuple):
        right = isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value)
    elif expected in _OF_TYPE:
        right = _OF_TYPE[expected].refusal(value) is None
    else:  # checked where it is read
        return
    if not right or (key in _POSITIVE and value <= 0) or (key in _TAPS and value < 2):
        raise malformed(key, value)


def _only(allowed: tuple[object, ...], kind: str) -> str:
    values = " or ".join(map(repr, allowed)) or "null"
    return f"aiakq's {kind} models compute with {values} only"


def _refused(key: str, value: object, reason: str) -> AiakqError:
    return error("config_key_unsupported", key=key[:64], value=f"{value!r:.64}", reason=reason)
